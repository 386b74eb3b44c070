"""Byte offsets of a state file's parts."""

from dataclasses import dataclass

from nearflash.abi.formats import FP32
from nearflash.storage.direct import BLOCK_BYTES
from nearflash.storage.manifest import Manifest

__all__ = ["ARRAYS", "Layout"]

ARRAYS = ("p", "m", "v")
"""Stored arrays, fp32: master parameters, first moments (exp_avg), second moments (exp_avg_sq)."""


@dataclass(frozen=True)
class Layout:
    """Offsets, in bytes, all multiples of 4096. What belongs to step t lies in slot t mod 2."""

    manifest: Manifest
    manifest_bytes: int

    manifest_offset = 2 * BLOCK_BYTES

    @property
    def table_bytes(self) -> int:
        """Room for the checksum table of one slot: 11 characters a checksum, up to 12 a tensor's step count."""
        longest = 256 + 11 * len(ARRAYS) * len(self.manifest.extents) + 12 * len(self.manifest.tensors)
        return -(-longest // BLOCK_BYTES) * BLOCK_BYTES

    @property
    def size_bytes(self) -> int:
        """Length of the file."""
        return self.array_offset(1, ARRAYS[-1]) + self.manifest.params * FP32.bytes

    def superblock_offset(self, step: int) -> int:
        """Where the superblock of that step lies."""
        return step % 2 * BLOCK_BYTES

    def table_offset(self, step: int) -> int:
        """Where the checksum table of that step lies."""
        return self.manifest_offset + self.manifest_bytes + step % 2 * self.table_bytes

    def array_offset(self, step: int, array: str, start: int = 0) -> int:
        """Where parameter `start` of an array lies in that step's slot."""
        arrays_before = step % 2 * len(ARRAYS) + ARRAYS.index(array)
        slots = self.manifest_offset + self.manifest_bytes + 2 * self.table_bytes
        return slots + (arrays_before * self.manifest.params + start) * FP32.bytes
