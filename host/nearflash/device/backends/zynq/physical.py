"""Physical addresses of the board by /dev/mem: registers as 32-bit words, a region of memory as bytes.

Opened with O_SYNC, so that no mapping is cached. Of memory that the device tree sets apart Linux makes strongly ordered
memory, which takes no access across an alignment: copies keep a buffer's offsets, and are aligned where it is.
"""

import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import DeviceError

__all__ = ["PhysicalMemory", "Words"]


class Words:
    """Registers: 32-bit words at byte offsets from a page's address."""

    def __init__(self, words: NDArray[np.uint32]) -> None:
        self._words = words

    def read(self, offset: int) -> int:
        """The word at a byte offset."""
        return int(self._words[offset // 4])

    def write(self, offset: int, value: int) -> None:
        """Write the word at a byte offset."""
        self._words[offset // 4] = value


class PhysicalMemory:
    """Mappings of the file of physical memory. Raises DeviceError, at each, where this user or this kernel may not."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def map_bytes(self, address: int, size_bytes: int, path: Path | None = None) -> NDArray[np.uint8]:
        """Bytes at [address, address + size_bytes), both of whole pages; `path`: of another file."""
        source = path or self._path
        try:
            file = os.open(source, os.O_RDWR | os.O_SYNC | os.O_CLOEXEC)
            try:
                return np.frombuffer(mmap.mmap(file, size_bytes, offset=address), np.uint8)
            finally:
                os.close(file)
        except PermissionError as error:
            raise DeviceError(
                f"{source} must be opened by root, in a kernel that lets it map {address:#x}, not fail "
                f"({error.strerror}): use `sudo`; with CONFIG_STRICT_DEVMEM use u-dma-buf's memory"
            ) from error
        except (OSError, ValueError) as error:
            raise DeviceError(
                f"{source} must have {size_bytes} bytes at {address:#x} to map, not fail: {error}"
            ) from error

    def map_words(self, address: int, size_bytes: int) -> Words:
        """Registers at [address, address + size_bytes)."""
        return Words(self.map_bytes(address, size_bytes).view(np.uint32))
