"""Spare records: what belongs to each page beside its data, kept in memory and in a zone after each block.

A record is aux (8 bytes a codeword), CRC32C over key ‖ aux ‖ data, XOR the file's salt (u32, little endian), zeros up
to a power of two; an erased page's is zeros only. A zone is padded to whole 4,096-byte blocks.
"""

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.codeword import AUX_BYTES
from nearflash.storage.flash.geometry import FlashGeometry, PageNumbers
from nearflash.storage.io.backend import BLOCK_BYTES
from nearflash.storage.io.direct import aligned_buffer

__all__ = ["SpareRecords"]

_CHECKSUM_BYTES = 4


class SpareRecords:
    """The records of all pages: about 3 % of the flash, of which memory is taken for what was programmed."""

    def __init__(self, geometry: FlashGeometry) -> None:
        self._pages = pages = geometry.pages_per_block
        aux_bytes = geometry.codewords * AUX_BYTES
        self.record_bytes = 1 << (aux_bytes + _CHECKSUM_BYTES - 1).bit_length()
        self.zone_bytes = -(-pages * self.record_bytes // BLOCK_BYTES) * BLOCK_BYTES
        memory = aligned_buffer(geometry.blocks * self.zone_bytes)
        self._zones = memory.reshape(geometry.blocks, self.zone_bytes)
        steps = (self.zone_bytes, self.record_bytes)
        self._aux: NDArray[np.uint8] = np.ndarray(
            (geometry.blocks, pages, geometry.codewords, AUX_BYTES), np.uint8, memory.data, 0, (*steps, AUX_BYTES, 1)
        )
        self._checksums: NDArray[np.uint32] = np.ndarray((geometry.blocks, pages), "<u4", memory.data, aux_bytes, steps)

    def put(self, pages: PageNumbers, aux: NDArray[np.uint8], checksums: NDArray[np.uint32]) -> None:
        """Set the records of pages."""
        at = np.divmod(pages, self._pages)
        self._aux[at] = aux
        self._checksums[at] = checksums

    def get(self, pages: PageNumbers) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
        """Copies of aux (p, codewords, 8) and checksums (p,)."""
        at = np.divmod(pages, self._pages)
        return self._aux[at], self._checksums[at]

    def are_erased(self, pages: PageNumbers) -> NDArray[np.bool_]:
        """Which pages have no record."""
        aux, checksums = self.get(pages)
        erased: NDArray[np.bool_] = ~aux.any(axis=(1, 2)) & (checksums == 0)
        return erased

    def zone(self, block: int) -> NDArray[np.uint8]:
        """The zone of a block as it lies in the file."""
        zone: NDArray[np.uint8] = self._zones[block]
        return zone

    def span(self, pages: PageNumbers) -> slice:
        """The part of their block's zone, in whole 4,096-byte blocks, that holds the records of `pages` (rising)."""
        first, last = int(pages[0]) % self._pages, int(pages[-1]) % self._pages
        start = first * self.record_bytes // BLOCK_BYTES * BLOCK_BYTES
        return slice(start, -(-(last + 1) * self.record_bytes // BLOCK_BYTES) * BLOCK_BYTES)
