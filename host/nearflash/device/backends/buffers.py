"""Buffers that a board's vendor runtime allocates, and which of them are still allocated."""

from abc import abstractmethod

from nearflash.abi.errors import AddressError
from nearflash.device.base import Buffer, LinkBytes
from nearflash.device.memory import Memory

__all__ = ["BoardMemory", "OwnedBuffer"]


class OwnedBuffer(Buffer):
    """A buffer that holds something of the vendor's runtime."""

    @abstractmethod
    def release(self) -> None:
        """Give it back: the buffer's views must not be used afterwards."""


class BoardMemory(Memory):
    """Memory whose buffers a backend's `make` takes from the vendor's runtime."""

    def __init__(self) -> None:
        self._buffers: dict[int, OwnedBuffer] = {}

    @abstractmethod
    def make(self, size_bytes: int, links: LinkBytes) -> OwnedBuffer:
        """A buffer of at least a byte. Raises AddressError where there is no room."""

    def allocate(self, size_bytes: int, links: LinkBytes) -> Buffer:
        """A buffer of whole pages. Raises AddressError for less than a byte and where there is no room."""
        if size_bytes <= 0:
            raise AddressError(f"a buffer's size must be at least 1 byte, not {size_bytes!r}")
        buffer = self.make(size_bytes, links)
        self._buffers[buffer.address] = buffer
        return buffer

    def free(self, buffer: Buffer) -> None:
        """Release the buffer. Raises AddressError for one that is not allocated here."""
        memory = self._buffers.pop(buffer.address, None)
        if memory is None:
            raise AddressError(f"a buffer must be allocated to be freed, not at {buffer.address:#x} (freed twice?)")
        memory.release()

    def close(self) -> None:
        """Release all that is allocated."""
        for address in list(self._buffers):
            self._buffers.pop(address).release()
