"""Device `xrt`: a kernel on a PCIe card that the Xilinx Runtime manages.

`xrt:update-smartssd` is the only card of this machine, `xrt:update-smartssd@0000:3b:00.1` the one at that PCI address.
The xclbin is the one of the manifest `bitstreams/smartssd/update.json`, or below the folder that NEARFLASH_BITSTREAMS
names.
Completion is polled: XRT gives the interrupt of a kernel that it manages to its own scheduler.
"""

from contextlib import ExitStack
from typing import ClassVar

from nearflash.abi.errors import NearflashError
from nearflash.abi.kernel.config import KernelConfig
from nearflash.abi.kernel.config import config as named_config
from nearflash.abi.kernel_arguments import kernel_arguments
from nearflash.abi.python310 import Self
from nearflash.device import topology
from nearflash.device.backends.board import BoardDevice, use_p2p, verify_build
from nearflash.device.backends.xrt.card import DRIVER, XrtCard, choose_card
from nearflash.device.backends.xrt.functions import XrtFunctions, load_library
from nearflash.device.backends.xrt.memory import XrtMemory

__all__ = ["XrtDevice", "first_pointer"]


def first_pointer(config: KernelConfig) -> int:
    """Index of the kernel's first argument that is a pointer."""
    return next(argument.index for argument in kernel_arguments(config.registers) if argument.is_pointer)


class XrtDevice(BoardDevice):
    """A kernel on an open card. Closing it closes the card.

    `p2p`: buffers have a window for direct I/O, where P2P is enabled (`sudo xbutil configure --p2p enable`).
    """

    DEFAULT_BUILD: ClassVar[str] = "smartssd"

    def __init__(self, config: KernelConfig, card: XrtCard, *, named: bool = False, p2p: bool = True) -> None:
        self._card = card
        self.memory = XrtMemory(card, card.group(first_pointer(config)), p2p=p2p)
        super().__init__("xrt", config, self.memory, card.address if named else "")

    @property
    def p2p(self) -> bool:
        """Whether buffers have a window for direct I/O."""
        return self.memory.p2p

    @property
    def drives(self) -> list[topology.Drive]:
        """NVMe drives under the card's switch."""
        return topology.drives_beside(self._card.address)

    @classmethod
    def open(cls, config: str) -> Self:
        """Open on the only card. Raises UnknownDeviceError, DeviceError, ConfigError, DigestError."""
        return cls.open_card(config, "")

    @classmethod
    def open_card(cls, config: str, card: str) -> Self:
        """Open on the card at that PCI address. Raises as `open`."""
        build = named_config(config)
        functions = XrtFunctions(load_library())
        address = choose_card(card)
        opened = XrtCard(functions, address, verify_build(build).file(".xclbin"), build.kernel)
        try:
            return cls(build, opened, named=bool(card), p2p=use_p2p())
        except NearflashError:
            opened.close()
            raise

    @classmethod
    def presence(cls) -> str:
        """Cards, and the drives beside them. Raises UnknownDeviceError where runtime or cards are missing."""
        load_library()
        shown = []
        for address in topology.cards(DRIVER) or [choose_card()]:
            drives = ", ".join(map(str, topology.drives_beside(address)))
            shown.append(
                f"card {address}, " + (f"{drives} under its switch" if drives else "no drive under its switch")
            )
        return "; ".join(shown)

    def read_word(self, offset: int) -> int:
        """The 32-bit register at a byte offset."""
        return self._card.read_register(offset)

    def write_register(self, offset: int, value: int) -> None:
        """Write the 32-bit register at a byte offset."""
        self._card.write_register(offset, value)

    def release(self) -> None:
        """Free all buffers, release kernel and card; of a card that is gone, as much as can be."""
        with ExitStack() as steps:
            steps.callback(self._card.close)
            steps.callback(self.memory.close)
