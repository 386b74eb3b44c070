"""The places of blocks in a file, and its superblock.

    superblock | segment 0: record zone, slots | segment 1: … | …

Every slot has room for one block. Segments are filled from their first slot on, and erased whole.
"""

import secrets
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from nearflash.abi.errors import CommandError, StateError
from nearflash.storage.blocks.record import HEADER_BYTES, RECORD
from nearflash.storage.io.backend import BLOCK_BYTES
from nearflash.storage.io.direct import DirectFile
from nearflash.storage.io.sealed import read_superblock, seal
from nearflash.support.tables import check_fields

__all__ = ["BLOCKS_VERSION", "KIND", "BlockLabel", "BlockLayout", "read_label"]

BLOCKS_VERSION = 2
"""Raised whenever the file's layout changes meaning; other versions are rejected."""
KIND = "blocks"
"""Of the sealed superblock."""
SEGMENT_BYTES = 64 << 20
"""Data of a segment: long enough that erasing it costs little beside filling it."""
_LEAST_SEGMENTS = 4
"""One that is filled, one that is free, and two to choose from."""
_USUAL_SEGMENTS = 32
"""Of a small store: what is evicted at once is a small part of it."""
_NAMESPACE_BYTES = 1024


@dataclass(frozen=True)
class BlockLayout:
    """Sizes of a file of blocks."""

    block_bytes: int
    """Most that a block has."""
    segment_slots: int
    segments: int

    @classmethod
    def fit(cls, capacity_bytes: int, block_bytes: int) -> Self:
        """The layout of a file of `capacity_bytes` at most. Raises CommandError where that is too little."""
        if block_bytes < 1:
            raise CommandError(f"block_bytes must be at least 1, not {block_bytes!r}")
        slot_bytes = cls(block_bytes, 1, 1).slot_bytes
        share = min(SEGMENT_BYTES, capacity_bytes // _USUAL_SEGMENTS)
        slots = max(share // slot_bytes, 1)
        segment_bytes = cls(block_bytes, slots, 1).segment_bytes
        segments = (capacity_bytes - BLOCK_BYTES) // segment_bytes
        if segments < _LEAST_SEGMENTS:
            least = BLOCK_BYTES + _LEAST_SEGMENTS * cls(block_bytes, 1, 1).segment_bytes
            raise CommandError(f"capacity_bytes must be at least {least} for such blocks, not {capacity_bytes}")
        return cls(block_bytes, slots, segments)

    @property
    def slot_bytes(self) -> int:
        """A block in whole 4,096-byte blocks."""
        return _whole(self.block_bytes)

    @property
    def zone_bytes(self) -> int:
        """A segment's header and records."""
        return _whole(HEADER_BYTES + self.segment_slots * RECORD.itemsize)

    @property
    def segment_bytes(self) -> int:
        """Records and slots."""
        return self.zone_bytes + self.segment_slots * self.slot_bytes

    @property
    def slots(self) -> int:
        """Slots of all segments."""
        return self.segments * self.segment_slots

    @property
    def file_bytes(self) -> int:
        """Length of the file."""
        return BLOCK_BYTES + self.segments * self.segment_bytes

    def zone_at(self, segment: int) -> int:
        """Offset of a segment's records."""
        return BLOCK_BYTES + segment * self.segment_bytes

    def slot_of(self, record: Any) -> int:
        """The slot in which a record states that its block lies."""
        return int(record["segment"]) * self.segment_slots + int(record["slot"])

    def slot_at(self, slot: int) -> int:
        """Offset of a slot, numbered over all segments."""
        segment, place = divmod(slot, self.segment_slots)
        return self.zone_at(segment) + self.zone_bytes + place * self.slot_bytes


@dataclass(frozen=True)
class BlockLabel:
    """The superblock of a file of blocks; written once."""

    layout: BlockLayout
    namespace: str
    salt: int
    """Of this file alone, 64 bits: records and blocks of another file do not count."""

    @classmethod
    def create(cls, layout: BlockLayout, namespace: str) -> Self:
        """A new file's. Raises CommandError for a namespace without text, or of more than 1,024 bytes."""
        if not 0 < len(namespace.encode()) <= _NAMESPACE_BYTES:
            raise CommandError(f"namespace must have 1 to {_NAMESPACE_BYTES} bytes, not {namespace!r:.80}")
        return cls(layout, namespace, secrets.randbits(64))

    @property
    def identity(self) -> bytes:
        """SHA-256 of namespace and salt: a part of every block's identity (32 bytes)."""
        return sha256(self.salt.to_bytes(8, "little") + self.namespace.encode()).digest()

    def pack(self) -> Any:
        """The sealed block."""
        body = {"version": BLOCKS_VERSION, "namespace": self.namespace, "salt": self.salt, **asdict(self.layout)}
        return seal(KIND, body, BLOCK_BYTES)

    def check(self, path: Path, block_bytes: int, namespace: str) -> None:
        """Raise StateError where the file is of other blocks or of another namespace."""
        if (self.layout.block_bytes, self.namespace) != (block_bytes, namespace):
            raise StateError(
                f"{path} must hold blocks of {block_bytes} bytes of {namespace!r}, not of {self.layout.block_bytes} "
                f"bytes of {self.namespace!r}: give another path, or remove the file"
            )


def read_label(file: DirectFile) -> BlockLabel:
    """The superblock of an open file. Raises StateError, naming what is wrong."""
    body = read_superblock(file, KIND, BLOCKS_VERSION, "a block store")
    what = f"the superblock of {file.path}"
    _, *sizes, namespace, salt = check_fields(
        what, body, version=int, block_bytes=int, segment_slots=int, segments=int, namespace=str, salt=int
    )
    if min(sizes) < 1 or not 0 <= salt < 1 << 64:
        raise StateError(f"{what} must have sizes of at least 1 and a salt of 64 bits, not {sizes} and {salt}")
    layout = BlockLayout(*sizes)
    if layout.file_bytes > file.size_bytes:
        raise StateError(f"{file.path} must have {layout.file_bytes} bytes, not {file.size_bytes}: it was cut short")
    return BlockLabel(layout, namespace, salt)


def _whole(size_bytes: int) -> int:
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
