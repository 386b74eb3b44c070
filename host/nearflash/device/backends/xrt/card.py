"""A card that is open: its xclbin loaded, one kernel of it held exclusively, its registers."""

import ctypes
import os
from contextlib import ExitStack
from pathlib import Path

from nearflash.abi.errors import DeviceError, UnknownDeviceError
from nearflash.device import topology
from nearflash.device.backends.xrt.functions import UUID_BYTES, XrtFunctions

__all__ = ["XrtCard", "choose_card"]

DRIVER = "xocl"
"""Linux' driver of a card's user function."""
_NAME_BYTES = 256


def choose_card(card: str = "") -> str:
    """Address of the card: the one that is named, or the only one.

    Raises UnknownDeviceError, which lists the cards, where there is none, not that one, or several without a name;
    DeviceError where this user may not open it.
    """
    cards = topology.cards(DRIVER)
    if not cards:
        raise UnknownDeviceError(
            f"device 'xrt' needs a card: no PCI function has driver {DRIVER}; see `lspci -d 10ee:`, `xbutil examine`"
        )
    if not card and len(cards) > 1:
        raise UnknownDeviceError(f"one of several cards must be named (device@{cards[0]}): {', '.join(cards)}")
    chosen = card or cards[0]
    if chosen not in cards:
        raise UnknownDeviceError(f"card must be one of {', '.join(cards)}, not {card!r}")
    node = topology.render_node(chosen)
    if node is not None and not os.access(node, os.R_OK | os.W_OK):
        raise DeviceError(
            f"{node} of card {chosen} must be readable and writable for this user: join the group that owns it "
            "(usually `render`), then log in again"
        )
    return chosen


class XrtCard:
    """The card at PCI address `address` with `xclbin` loaded and `kernel` held.

    The kernel's context is exclusive: while it is open no other process opens the kernel, and XRT's own scheduler does
    not touch its registers, which this driver reads and writes itself. Raises DeviceError, and holds nothing then.
    """

    def __init__(self, functions: XrtFunctions, address: str, xclbin: Path, kernel: str) -> None:
        self.functions, self.address = functions, address
        self._open = ExitStack()
        call = functions.call
        with ExitStack() as opened:
            self.device = call("xrtDeviceOpenByBDF", address.encode(), to=f"open card {address}")
            opened.callback(call, "xrtDeviceClose", self.device, to=f"close card {address}")
            image = call("xrtXclbinAllocFilename", os.fsencode(xclbin), to=f"read {xclbin}")
            try:
                self.platform = self._platform(image)
                uuid = ctypes.create_string_buffer(UUID_BYTES)
                call("xrtXclbinGetUUID", image, uuid, to=f"read the UUID of {xclbin}")
                to = f"load {xclbin}, which is for platform {self.platform}, to card {address}"
                call("xrtDeviceLoadXclbinHandle", self.device, image, to=to)
            finally:
                call("xrtXclbinFreeHandle", image, to=f"release {xclbin}")
            to = f"hold kernel {kernel!r} of {xclbin} exclusively"
            self.kernel = call("xrtPLKernelOpenExclusive", self.device, uuid, kernel.encode(), to=to)
            opened.callback(call, "xrtKernelClose", self.kernel, to=f"release kernel {kernel!r}")
            self._open = opened.pop_all()

    def _platform(self, image: int) -> str:
        """Name of the platform that an xclbin was linked for."""
        name, size = ctypes.create_string_buffer(_NAME_BYTES), ctypes.c_int()
        to = "read the xclbin's platform"
        self.functions.call("xrtXclbinGetXSAName", image, name, _NAME_BYTES, ctypes.byref(size), to=to)
        return name.value.decode("ascii", "replace")

    def read_register(self, offset: int) -> int:
        """The kernel's 32-bit register at a byte offset."""
        value = ctypes.c_uint32()
        to = f"read register {offset:#x}"
        self.functions.call("xrtKernelReadRegister", self.kernel, offset, ctypes.byref(value), to=to)
        return value.value

    def write_register(self, offset: int, value: int) -> None:
        """Write the kernel's 32-bit register at a byte offset."""
        self.functions.call("xrtKernelWriteRegister", self.kernel, offset, value, to=f"write register {offset:#x}")

    def group(self, argument: int) -> int:
        """Memory bank that the kernel's argument of that number points into."""
        return int(
            self.functions.call("xrtKernelArgGroupId", self.kernel, argument, to=f"find bank of argument {argument}")
        )

    def close(self) -> None:
        """Release kernel and card. May be called twice."""
        self._open.close()
