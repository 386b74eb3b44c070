"""Memory of the attend kernel's model: bytes at addresses, and the pages that entries of page tables name."""

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.codeword import SEALED_BYTES
from nearflash.abi.attention.pages import PageEntry
from nearflash.abi.errors import AddressError
from nearflash.abi.kernel.config import AttendConfig
from nearflash.device.backends.model.nand import SimulatedNand
from nearflash.device.memory import SimulatedMemory

__all__ = ["SimulatedPages"]

Bools = NDArray[np.bool_]
Bytes = NDArray[np.uint8]
Entries = NDArray[np.uint64]


class SimulatedPages:
    """A reader of pages (nearflash.model.attention.control.pages.PageReader) over simulated memory and NAND."""

    def __init__(self, config: AttendConfig, memory: SimulatedMemory, nand: SimulatedNand) -> None:
        self._config, self._memory, self._nand = config, memory, nand

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

    def read(self, entries: Entries, pages: int, codewords: int) -> tuple[Bytes, Bools]:
        """See PageReader. Raises AddressError for a page outside the memory."""
        sealed = np.zeros((len(entries), pages, codewords, SEALED_BYTES), np.uint8)
        lost = np.zeros(sealed.shape[:3], bool)
        for group, marks, word in zip(sealed, lost, entries.tolist(), strict=True):
            entry = PageEntry.unpack(word)
            if entry.address is not None:
                group[:] = self.bytes_at(entry.address, group.size).reshape(group.shape)
                continue
            for second in range(pages):  # V's page lies on the sibling lun
                page = self._nand.page(entry.channel, entry.lun ^ second, entry.row)
                marks[second] = np.arange(codewords) >= len(page)
                group[second, : len(page)] = page[:codewords]
        shape = (len(entries), pages * codewords)
        return sealed.reshape(*shape, SEALED_BYTES), lost.reshape(shape)

    def _is_legal(self, entry: PageEntry) -> bool:
        placed = entry.lun < self._config.luns if entry.address is None else entry.address % 8 == 0
        return placed and entry.channel < self._config.channels
