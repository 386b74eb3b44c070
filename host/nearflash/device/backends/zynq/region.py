"""Contiguous memory for buffers: u-dma-buf's, or what the device tree sets apart for nearflash.

/sys/class/u-dma-buf/udmabuf0/{phys_addr,size} and /dev/udmabuf0    https://github.com/ikwzm/udmabuf
/proc/device-tree/reserved-memory/nearflash@*/reg                    by /dev/mem; one cell each of address and size
"""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import DeviceError
from nearflash.device.backends.buffers import BoardMemory, OwnedBuffer
from nearflash.device.base import LinkBytes
from nearflash.device.memory import PAGE_BYTES, SimulatedMemory

__all__ = ["LEAST_BYTES", "Region", "RegionBuffer", "RegionMemory", "find_region"]

LEAST_BYTES = 1 << 20
"""Of the smallest region that any command is worth."""
_TAKEN = "reserved-memory/nearflash@*/reg"
_ADVICE = (
    "load u-dma-buf (`modprobe u-dma-buf udmabuf0=0x2000000`), or add a node nearflash@ADDRESS to the device tree's "
    "reserved-memory"
)


@dataclass(frozen=True)
class Region:
    """Addresses [address, address + size_bytes); `path`: the file to map from its begin, None: physical memory's."""

    address: int
    size_bytes: int
    path: Path | None = None

    def check(self, most: int) -> None:
        """Raise DeviceError for one that is too small, not of whole pages, or beyond the memory's end at `most`."""
        if self.size_bytes < LEAST_BYTES:
            raise DeviceError(
                f"memory for buffers must be at least {LEAST_BYTES} bytes, not {self.size_bytes}: {_ADVICE}"
            )
        if self.address % PAGE_BYTES or self.size_bytes % PAGE_BYTES or self.address + self.size_bytes > most:
            raise DeviceError(
                f"memory for buffers must be whole pages of {PAGE_BYTES} bytes below {most:#x}, which the logic "
                f"reaches, not {self.size_bytes} bytes at {self.address:#x}: {_ADVICE}"
            )


def find_region(devices: Path, buffers: Path, tree: Path) -> Region:
    """The first of u-dma-buf's buffers in `buffers`, with files in `devices`; else the device tree's.

    Raises DeviceError where there is neither.
    """
    for folder in sorted(buffers.glob("*")):
        address, size = ((folder / name).read_text().strip() for name in ("phys_addr", "size"))
        return Region(int(address, 0), int(size, 0), devices / folder.name)
    for reg in sorted(tree.glob(_TAKEN)):
        cells = np.frombuffer(reg.read_bytes(), ">u4")
        if len(cells) == 2 and re.fullmatch("nearflash@[0-9a-f]+", reg.parent.name):
            return Region(int(cells[0]), int(cells[1]))
    raise DeviceError(f"memory for buffers must be there, not neither {buffers} nor {tree}/{_TAKEN}: {_ADVICE}")


class RegionBuffer(OwnedBuffer):
    """A range of the region, copied by the processor. It has no window: Linux rejects direct I/O into such mappings."""

    def __init__(self, memory: SimulatedMemory, size_bytes: int, links: LinkBytes) -> None:
        self._memory = memory
        self._range = memory.allocate(size_bytes, links)
        self.address, self.size_bytes, self.host = self._range.address, size_bytes, self._range.host
        self.p2p = None

    def sync_to_device(self, offset: int = 0, size_bytes: int | None = None) -> None:
        """Copy host bytes into the region. Raises AddressError outside the buffer."""
        self._range.sync_to_device(offset, size_bytes)

    def sync_from_device(self, offset: int = 0, size_bytes: int | None = None) -> None:
        """Copy bytes of the region into the host's. Raises AddressError outside the buffer."""
        self._range.sync_from_device(offset, size_bytes)

    def release(self) -> None:
        """Give the range back."""
        self._memory.free(self._range)


class RegionMemory(BoardMemory):
    """Buffers in a mapped region, handed out first fit."""

    def __init__(self, region: Region, storage: NDArray[np.uint8]) -> None:
        super().__init__()
        self._ranges = SimulatedMemory(base=region.address, storage=storage)
        self.size_bytes = region.size_bytes

    def make(self, size_bytes: int, links: LinkBytes) -> RegionBuffer:
        """A buffer of whole pages. Raises AddressError where there is no room."""
        return RegionBuffer(self._ranges, size_bytes, links)
