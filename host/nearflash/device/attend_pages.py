"""Memory of the attend kernel's model: bytes at addresses, and the pages that entries of page tables name."""

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attend.codeword import SEALED_BYTES
from nearflash.abi.attend.pages import PageEntry
from nearflash.abi.config import AttendConfig
from nearflash.abi.errors import AddressError
from nearflash.device.memory import SimulatedMemory

__all__ = ["SimulatedPages"]

Bools = NDArray[np.bool_]
Bytes = NDArray[np.uint8]
Entries = NDArray[np.uint64]


class SimulatedPages:
    """A reader of pages (nearflash.model.attend.pages.PageReader) over simulated memory."""

    def __init__(self, config: AttendConfig, memory: SimulatedMemory) -> None:
        self._config, self._memory = config, memory

    def bytes_at(self, address: int, size_bytes: int) -> Bytes:
        """The bytes at [address, address + size_bytes), to read and write. Raises AddressError outside the memory."""
        start = address - self._memory.base
        if start < 0 or start + size_bytes > self._memory.size_bytes:
            raise AddressError(f"a range must lie in the device's memory, not at {address:#x}")
        return self._memory.view(address, size_bytes)

    def legal(self, entries: Entries) -> Bools:
        """Whether the build has such a place."""
        words = entries.reshape(-1).tolist()
        return np.array([self._is_legal(PageEntry.unpack(word)) for word in words], bool).reshape(entries.shape)

    def read(self, entries: Entries, codewords: int) -> tuple[Bytes, Bools]:
        """Sealed codewords (P, codewords, 528); which are uncorrectable. Raises AddressError outside the memory."""
        sealed = np.zeros((len(entries), codewords, SEALED_BYTES), np.uint8)
        lost = np.zeros(sealed.shape[:2], bool)
        for page, found, word in zip(sealed, lost, entries.tolist(), strict=True):
            entry = PageEntry.unpack(word)
            if entry.address is None:
                found[:] = True
            else:
                page[:] = self.bytes_at(entry.address, page.size).reshape(page.shape)
        return sealed, lost

    def _is_legal(self, entry: PageEntry) -> bool:
        placed = entry.unit < self._config.units if entry.address is None else entry.address % 8 == 0
        return placed and entry.channel < self._config.channels
