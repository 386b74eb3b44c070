"""Records of blocks, and the zone of a segment that holds them.

A zone is a header of 512 bytes, then 128 bytes for each slot; zeros: nothing is there. A record lies within a sector,
so that a torn write leaves the one of before or the new one. It counts where its CRC32C is right, its place is the one
where it lies, and its generation is its segment's: erasing a segment is writing a header of a new generation, so that
blocks of before never come back, whatever of the rest of the zone has reached the drive.

A block's CRC32C is that of its identity and its bytes; identity: key, its length, the block's length, segment, slot,
generation, and SHA-256 of namespace and salt.

Source: RFC 3720, 12.1 (CRC32C).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.storage.io.backend import BLOCK_BYTES
from nearflash.storage.io.checksum import copy_checked, crc32c, crc32c_each

__all__ = [
    "HEADER_BYTES", "KEY_BYTES", "LIFE", "RECORD", "Zone", "block_checksums", "copy_good_blocks", "keys_of",
]  # fmt: skip

KEY_BYTES = 48
"""Of the longest key: a hash of 32 bytes, and which of a model's KV groups it is of."""
HEADER_BYTES = 512
LIFE = ("stored", "put_bytes", "written_bytes", "evicted", "moved")
"""Counts since the file was made, as BlockStatistics has them, which each header states as of its erase."""
_PLACE: list[Any] = [("key", "u1", KEY_BYTES), ("identity", "u1", 32), ("key_bytes", "<u4"), ("length", "<u4"),
                     ("segment", "<u4"), ("slot", "<u4"), ("generation", "<u8")]  # fmt: skip
RECORD = np.dtype([*_PLACE, ("sequence", "<u8"), ("data_crc", "<u4"), ("padding", "u1", 8), ("crc", "<u4")])
"""128 bytes; sequence: rises with every block that is written, so of two with one key the newer one counts."""
_IDENTITY_BYTES = np.dtype(_PLACE).itemsize
_HEADER = np.dtype([("magic", "S8"), ("identity", "u1", 32), ("segment", "<u8"), ("generation", "<u8"),
                    ("erases", "<u8"), *((name, "<u8") for name in LIFE), ("crc", "<u4")])  # fmt: skip
_MAGIC = b"nfblocks"
_CRC_BYTES = 4

Records = NDArray[Any]


def block_checksums(records: Records, blocks: Iterable[NDArray[np.uint8]]) -> NDArray[np.uint32]:
    """CRC32C of each record's identity and of its block, which is the first bytes of each of `blocks`."""
    return crc32c_each(_parts(records, blocks), _identity_checksums(records))


def copy_good_blocks(
    records: Records, blocks: Iterable[NDArray[np.uint8]], targets: Sequence[NDArray[np.uint8] | None]
) -> NDArray[np.bool_]:
    """Whether each block has its record's checksum (see block_checksums); such a block is copied to its target."""
    return copy_checked(_parts(records, blocks), _identity_checksums(records), records["data_crc"], targets)


def keys_of(records: Records) -> list[bytes]:
    """The key in each record."""
    raw = np.ascontiguousarray(records["key"]).tobytes()
    lengths = records["key_bytes"].tolist()
    return [raw[number * KEY_BYTES : number * KEY_BYTES + length] for number, length in enumerate(lengths)]


def _identity_checksums(records: Records) -> NDArray[np.uint32]:
    """CRC32C of what says of each record whose block it is, and where it lies."""
    raw = records.view(np.uint8).reshape(len(records), RECORD.itemsize)[:, :_IDENTITY_BYTES]
    return np.array([crc32c(identity) for identity in raw], np.uint32)


def _parts(records: Records, blocks: Iterable[NDArray[np.uint8]]) -> list[NDArray[np.uint8]]:
    return [block[:length] for length, block in zip(records["length"].tolist(), blocks, strict=True)]


@dataclass
class Zone:
    """Header and records of one segment as they lie in the file: `memory`, whole 4,096-byte blocks, aligned."""

    memory: NDArray[np.uint8]
    identity: bytes
    segment: int
    slots: int

    @property
    def records(self) -> Records:
        """A view of the records, (slots,)."""
        end = HEADER_BYTES + self.slots * RECORD.itemsize
        return self.memory[HEADER_BYTES:end].view(RECORD)

    @property
    def generation(self) -> int:
        """The segment's generation; 0 where its header was never written, or is damaged."""
        header = self._header[0]
        good = header["crc"] == crc32c(self.memory[: _HEADER.itemsize - _CRC_BYTES])
        mine = header["magic"] == _MAGIC and header["identity"].tobytes() == self.identity
        return int(header["generation"]) if good and mine and header["segment"] == self.segment else 0

    @property
    def erases(self) -> int:
        """Erases of the segment, as its header counts them."""
        return int(self._header["erases"][0]) if self.generation else 0

    @property
    def life(self) -> dict[str, int]:
        """The counts of LIFE, as the header states them; none where it is not whole."""
        return {name: int(self._header[name][0]) for name in LIFE} if self.generation else {}

    def erase(self, generation: int, erases: int, life: Mapping[str, int]) -> None:
        """Begin a new generation, without records."""
        self.memory[:] = 0
        header = self._header
        header["magic"], header["segment"], header["generation"] = _MAGIC, self.segment, generation
        header["erases"] = erases
        for name, count in life.items():
            header[name] = count
        header["identity"] = np.frombuffer(self.identity, np.uint8)
        header["crc"] = crc32c(self.memory[: _HEADER.itemsize - _CRC_BYTES])

    def put(self, first: int, records: Records) -> None:
        """Set the records from slot `first` of the segment on; their own CRC32C is computed here.

        Those of no length are emptied.
        """
        raw = records.view(np.uint8).reshape(len(records), RECORD.itemsize)
        raw[records["length"] == 0] = 0
        records["crc"] = [crc32c(row[:-_CRC_BYTES]) if row.any() else 0 for row in raw]
        self.records[first : first + len(records)] = records

    def valid(self) -> NDArray[np.intp]:
        """Slots of the segment with a whole record of this file, of any generation."""
        records = self.records
        # Compared as numbers first: most slots of a new store have no record at all.
        mine = (records["segment"] == self.segment) & (records["slot"] == np.arange(self.slots))
        mine &= (records["key_bytes"] > 0) & (records["key_bytes"] <= KEY_BYTES)
        mine &= (records["identity"] == np.frombuffer(self.identity, np.uint8)).all(axis=1)
        raw = self.memory[HEADER_BYTES : HEADER_BYTES + records.nbytes].reshape(-1, RECORD.itemsize)
        found = np.flatnonzero(mine)
        good = [crc32c(raw[row, :-_CRC_BYTES]) == crc for row, crc in zip(found, records["crc"][found], strict=True)]
        valid: NDArray[np.intp] = found[np.array(good, bool)]
        return valid

    def find_damaged(self) -> NDArray[np.intp]:
        """Slots whose record is neither empty nor whole; all of them where the header is not."""
        filled = self.records.view(np.uint8).reshape(self.slots, RECORD.itemsize).any(axis=1)
        if not self.generation and self.memory[:HEADER_BYTES].any():
            return np.arange(self.slots)
        return np.setdiff1d(np.flatnonzero(filled), self.valid())

    def span(self, first: int, end: int) -> slice:
        """The part of `memory`, in whole 4,096-byte blocks, with the records of slots `first` to `end` - 1."""
        start, stop = (HEADER_BYTES + slot * RECORD.itemsize for slot in (first, end))
        return slice(start // BLOCK_BYTES * BLOCK_BYTES, -(-stop // BLOCK_BYTES) * BLOCK_BYTES)

    def count_used(self) -> int:
        """Slots from the first on up to the last one that has any record, damaged or not."""
        raw = self.records.view(np.uint8).reshape(self.slots, RECORD.itemsize)
        taken = np.flatnonzero(raw.any(axis=1))
        return int(taken[-1]) + 1 if len(taken) else 0

    @property
    def _header(self) -> Records:
        return self.memory[: _HEADER.itemsize].view(_HEADER)
