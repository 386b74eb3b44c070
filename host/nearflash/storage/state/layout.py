"""Byte offsets of a state file's parts."""

from dataclasses import dataclass
from functools import cached_property

from nearflash.storage.io.backend import BLOCK_BYTES
from nearflash.storage.state.manifest import ADAM_ARRAYS, Extent, Manifest
from nearflash.storage.state.metadata import METADATA_BYTES

__all__ = ["ARRAYS", "StateLayout"]

ARRAYS = tuple(array.name for array in ADAM_ARRAYS)
"""Names of the arrays that are stored by default."""


@dataclass(frozen=True)
class StateLayout:
    """Offsets, in bytes, all multiples of 4096. Superblock and table of step t lie in place t mod 2.

    Within a slot extent follows extent, and within an extent array follows array.
    """

    manifest: Manifest
    manifest_bytes: int
    extents: tuple[Extent, ...]
    """Those that lie in this file, in order."""

    manifest_offset = 2 * BLOCK_BYTES

    @cached_property
    def table_bytes(self) -> int:
        """Room for the table of one step: 12 characters a slot and checksum, up to 12 a tensor's step count."""
        checksums = sum(2 * len(array.name) + 16 + 12 * len(self.extents) for array in self.manifest.stored)
        longest = 256 + checksums + 12 * len(self.manifest.tensors) + METADATA_BYTES
        return -(-longest // BLOCK_BYTES) * BLOCK_BYTES

    @property
    def size_bytes(self) -> int:
        """Length of the file."""
        return self._slot_offset(0) + 2 * self._slot_bytes

    def superblock_offset(self, step: int) -> int:
        """Byte offset of the superblock of that step."""
        return step % 2 * BLOCK_BYTES

    def table_offset(self, step: int) -> int:
        """Byte offset of the checksum table of that step."""
        return self.manifest_offset + self.manifest_bytes + step % 2 * self.table_bytes

    def array_offset(self, slot: int, array: str, extent: Extent) -> int:
        """Byte offset of an extent of an array in slot 0 or 1."""
        before = 0
        for stored in self.manifest.stored:
            if stored.name == array:
                break
            before += stored.extent_bytes(extent)
        return self._slot_offset(slot) + self._positions[extent.index] * self._full_record_bytes + before

    @cached_property
    def _positions(self) -> dict[int, int]:
        return {extent.index: position for position, extent in enumerate(self.extents)}

    @cached_property
    def _slot_bytes(self) -> int:
        # Only the last extent of all may be shorter, and where it is here it is the last one here.
        return sum(map(self._record_bytes, self.extents))

    @cached_property
    def _full_record_bytes(self) -> int:
        return self._record_bytes(self.extents[0])

    def _slot_offset(self, slot: int) -> int:
        return self.table_offset(0) + 2 * self.table_bytes + slot * self._slot_bytes

    def _record_bytes(self, extent: Extent) -> int:
        return sum(array.extent_bytes(extent) for array in self.manifest.stored)
