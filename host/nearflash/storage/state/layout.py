"""Byte offsets of a state file's parts."""

from dataclasses import dataclass
from functools import cached_property

from nearflash.abi.optimizers import MasterFormat
from nearflash.storage.io.backend import BLOCK_BYTES
from nearflash.storage.state.manifest import ADAM_ARRAYS, Extent, Manifest, StateArray
from nearflash.storage.state.metadata import METADATA_BYTES

__all__ = ["ARRAYS", "LOG_HALVES", "StateLayout"]

LOG_HALVES = 2
"""Room for changes of an extent's weights, in lengths of these."""

ARRAYS = tuple(array.name for array in ADAM_ARRAYS)
"""Names of the arrays that are stored by default."""


@dataclass(frozen=True)
class StateLayout:
    """Offsets, in bytes, all multiples of 4096. Superblock and table of step t lie in place t mod 2.

    Within a slot extent follows extent, and within an extent array follows array. Behind both slots lies each extent's
    room for what steps change of its weights, where the master is split.
    """

    manifest: Manifest
    manifest_bytes: int
    extents: tuple[Extent, ...]
    """Those that lie in this file, in order."""

    manifest_offset = 2 * BLOCK_BYTES

    @cached_property
    def table_bytes(self) -> int:
        """Room for the table of one step: 12 characters a slot, checksum or length, up to 12 a tensor's step count."""
        columns = (*self.manifest.stored, *self._logged)
        checksums = sum(2 * len(array.name) + 16 + 12 * len(self.extents) for array in columns)
        longest = 256 + checksums + 12 * len(self.manifest.tensors) + METADATA_BYTES
        return -(-longest // BLOCK_BYTES) * BLOCK_BYTES

    @property
    def size_bytes(self) -> int:
        """Length of the file."""
        return self._slot_offset(0) + self.extents_bytes

    @property
    def extents_bytes(self) -> int:
        """Bytes of both slots and of the room for changes of weights."""
        return 2 * self._slot_bytes + sum(map(self.log_bytes, self.extents))

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

    def log_bytes(self, extent: Extent) -> int:
        """Room for what steps change of an extent's weights."""
        return sum(LOG_HALVES * array.extent_bytes(extent) for array in self._logged)

    def log_offset(self, extent: Extent) -> int:
        """Byte offset of that room."""
        return self._slot_offset(2) + self._positions[extent.index] * self.log_bytes(self.extents[0])

    @property
    def _logged(self) -> tuple[StateArray, ...]:
        """The weights of a split master."""
        return self.manifest.stored[:1] if self.manifest.master is MasterFormat.SPLIT else ()

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
