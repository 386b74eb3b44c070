"""The Xilinx Runtime's C functions over Verilated kernels: cards without cards.

Every function is a C function pointer of the types that the driver declares (nearflash.device.backends.xrt.functions),
so arguments and results are converted as for the real library. Failures set errno as that does.
"""

import ctypes
import errno
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.config import KernelConfig
from nearflash.abi.errors import AddressError
from nearflash.device.backends.xrt.functions import FUNCTIONS, P2P, TO_DEVICE, UUID_BYTES
from nearflash.device.base import LinkBytes
from nearflash.device.memory import Memory, SimulatedBuffer, anonymous
from nearflash.sim.boards.kernel import BoardKernel

__all__ = ["SimulatedCard", "XrtRuntime"]

_NO_ADDRESS = (1 << 64) - 1


@dataclass
class SimulatedCard:
    """A card whose shell is `platform`, with the kernel that its xclbin holds."""

    config: KernelConfig
    platform: str = "xilinx_u2_gen3x4_xdma_gc_2_202110_1"
    p2p: bool = True
    """P2P is enabled."""
    refuses: dict[str, int] = field(default_factory=dict)
    """Functions that fail on it, by name, and their errno."""
    kernel: BoardKernel | None = None
    """Once an xclbin was loaded."""
    holder: int = 0
    """Handle of the exclusive context; 0: nobody."""


class XrtRuntime:
    """The library object of a machine with these cards, by PCI address.

    `xclbins` gives the platform that an xclbin was linked for, by path; files that are not named there do not exist.
    `calls` holds the names of the functions called, in order.
    """

    def __init__(self, cards: Mapping[str, SimulatedCard], xclbins: Mapping[str, str]) -> None:
        self.cards, self.xclbins = dict(cards), dict(xclbins)
        self.calls: list[str] = []
        self.handles: dict[int, Any] = {}
        for name, (result, *arguments) in FUNCTIONS.items():
            setattr(self, name, ctypes.CFUNCTYPE(result, *arguments, use_errno=True)(self._counted(name)))

    def _counted(self, name: str) -> Any:
        function = getattr(self, f"_{name}")

        def called(*arguments: Any) -> Any:
            self.calls.append(name)
            card = next((c for c in self.cards.values() if name in c.refuses), None)
            if card is not None:
                return self._fail(card.refuses[name], name)
            return function(*arguments)

        return called

    def _fail(self, number: int, name: str) -> int | None:
        """What the library returns on failure: nothing, no address, or minus one."""
        ctypes.set_errno(number)
        result = FUNCTIONS[name][0]
        return {ctypes.c_void_p: None, ctypes.c_uint64: _NO_ADDRESS}.get(result, -1)

    def _new(self, what: Any) -> int:
        handle = 0x5000 + 16 * len(self.handles)
        self.handles[handle] = what
        return handle

    def _xrtDeviceOpenByBDF(self, address: bytes) -> int | None:
        card = self.cards.get(address.decode())
        # The real library sets no errno here.
        return self._fail(0, "xrtDeviceOpenByBDF") if card is None else self._new(card)

    def _xrtDeviceClose(self, device: int) -> int:
        self.handles[device] = None
        return 0

    def _xrtXclbinAllocFilename(self, path: bytes) -> int | None:
        if path.decode() not in self.xclbins:
            return self._fail(errno.ENOENT, "xrtXclbinAllocFilename")
        return self._new(self.xclbins[path.decode()])

    def _xrtXclbinFreeHandle(self, image: int) -> int:
        self.handles[image] = None
        return 0

    def _xrtXclbinGetXSAName(self, image: int, name: int, size: int, used: Any) -> int:
        text = self.handles[image].encode()[: size - 1] + b"\0"
        ctypes.memmove(name, text, len(text))
        used[0] = len(text)
        return 0

    def _xrtXclbinGetUUID(self, image: int, uuid: int) -> int:
        ctypes.memmove(uuid, self.handles[image].encode()[:UUID_BYTES].ljust(UUID_BYTES), UUID_BYTES)
        return 0

    def _xrtDeviceLoadXclbinHandle(self, device: int, image: int) -> int:
        card = self.handles[device]
        if self.handles[image] != card.platform:
            return -errno.EOPNOTSUPP
        card.kernel = card.kernel or BoardKernel(card.config)
        return 0

    def _xrtPLKernelOpenExclusive(self, device: int, uuid: int, name: bytes) -> int | None:
        card = self.handles[device]
        if name.decode() != card.config.kernel:
            return self._fail(errno.EINVAL, "xrtPLKernelOpenExclusive")
        if card.holder:
            return self._fail(errno.EBUSY, "xrtPLKernelOpenExclusive")
        card.holder = self._new(card)
        return int(card.holder)

    def _xrtKernelClose(self, kernel: int) -> int:
        self.handles[kernel].holder = 0
        self.handles[kernel] = None
        return 0

    def _xrtKernelArgGroupId(self, kernel: int, number: int) -> int:
        return 0

    def _xrtKernelReadRegister(self, kernel: int, offset: int, value: Any) -> int:
        value[0] = self.handles[kernel].kernel.read(offset)
        return 0

    def _xrtKernelWriteRegister(self, kernel: int, offset: int, value: int) -> int:
        self.handles[kernel].kernel.write(offset, value)
        return 0

    def _xrtBOAlloc(self, device: int, size: int, flags: int, group: int) -> int | None:
        card = self.handles[device]
        if flags & P2P and not card.p2p:
            return self._fail(errno.ENOMEM, "xrtBOAlloc")
        try:
            buffer = card.kernel.memory.allocate(size, LinkBytes())
        except AddressError:
            return self._fail(errno.ENOSPC, "xrtBOAlloc")
        return self._new(_BufferObject(card.kernel.memory, buffer, bool(flags & P2P)))

    def _xrtBOFree(self, handle: int) -> int:
        one = self.handles[handle]
        one.memory.free(one.buffer)
        self.handles[handle] = None
        return 0

    def _xrtBOAddress(self, handle: int) -> int:
        return int(self.handles[handle].buffer.address)

    def _xrtBOMap(self, handle: int) -> int:
        return int(self.handles[handle].mapped.ctypes.data)

    def _xrtBOSync(self, handle: int, direction: int, size: int, offset: int) -> int:
        one = self.handles[handle]
        if one.p2p:
            return -errno.EOPNOTSUPP  # as Linux' driver of the card
        span = slice(offset, offset + size)
        source, target = (one.mapped, one.buffer.p2p) if direction == TO_DEVICE else (one.buffer.p2p, one.mapped)
        target[span] = source[span]
        return 0


class _BufferObject:
    """A buffer of the card's memory, and what a process sees of it: the memory itself, or a copy of the host's."""

    def __init__(self, memory: Memory, buffer: SimulatedBuffer, p2p: bool) -> None:
        self.memory, self.buffer, self.p2p = memory, buffer, p2p
        self.mapped: NDArray[np.uint8] = buffer.p2p if p2p else anonymous(buffer.size_bytes)
