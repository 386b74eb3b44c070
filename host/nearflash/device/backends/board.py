"""Common parts of boards: polls that sleep, a card that is gone, and a kernel that no register stops."""

import os
import time
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import ClassVar

from nearflash.abi.errors import DeviceError, DeviceLostError
from nearflash.abi.kernel.config import KernelConfig
from nearflash.abi.python310 import Self
from nearflash.abi.registers import MAGIC
from nearflash.device.backends.remote.device import RemoteDevice
from nearflash.device.base import Device
from nearflash.device.bitstreams import BuildManifest, load_board, load_manifest
from nearflash.device.memory import Memory
from nearflash.device.registers import RegisterDevice

__all__ = ["BoardDevice", "LogicDevice", "use_p2p", "verify_build"]

P2P = "NEARFLASH_P2P"
"""Environment variable; 0: buffers without a window for direct I/O, as where the board has none."""
_ALL_ONES = 0xFFFF_FFFF


def verify_build(config: KernelConfig) -> BuildManifest:
    """The manifest of this build, its files compared with it.

    Raises ConfigError where the board has no such build, BitstreamError where it was not built or its files were
    changed, DigestError where it was built from another configuration than this host's.
    """
    manifest = load_manifest(load_board(config.name), config.kernel)
    manifest.verify()
    return manifest


def use_p2p(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether buffers get a window for direct I/O where the board has one."""
    return environment.get(P2P, "1") != "0"


class BoardDevice(RegisterDevice):
    """A kernel on a board. A backend adds `read_word`, `write_register`, and what `close` releases, in `release`.

    Raises DeviceLostError, at any call, where the card reads all ones: it is gone.
    """

    POLL_S = 50e-6
    """Sleep between two polls, s."""
    IDLE_S = 10.0
    """How long `reset` waits for the kernel to end its command, s."""

    def __init__(self, backend: str, config: KernelConfig, memory: Memory, card: str = "") -> None:
        self._label = f"{backend}:{config.full_name}" + (f"@{card}" if card else "")
        super().__init__(backend, config, memory)
        self.identity = replace(self.identity, card=card)

    @abstractmethod
    def read_word(self, offset: int) -> int:
        """The 32-bit register at a byte offset, as the bus gives it."""

    @abstractmethod
    def release(self) -> None:
        """Give the card back. Called once."""

    def read_register(self, offset: int) -> int:
        """The 32-bit register at a byte offset. Raises DeviceLostError."""
        value = self.read_word(offset)
        # A read that nobody answers is all ones; so may be a register, but never the magic number.
        if value == _ALL_ONES and self.read_word(self._map["magic"].offset) != MAGIC:
            raise DeviceLostError(
                f"{self._label} must answer register reads, not read {_ALL_ONES:#x} everywhere: the card was unplugged "
                "or reset, or lost its bitstream; state on flash is that of the last commit. Bring the card back, then "
                "open it again"
            )
        return value

    def pause(self) -> None:
        """Sleep for a moment."""
        time.sleep(self.POLL_S)

    def reset_kernel(self) -> None:
        """Wait until the kernel is idle: XRT's control words have no bit that aborts a command.

        Raises DeviceError where it is still busy after IDLE_S seconds.
        """
        control = self._map["control"]
        deadline = time.monotonic() + self.IDLE_S
        while not control.unpack(self.read("control"))["ap_idle"]:
            if time.monotonic() > deadline:
                raise DeviceError(
                    f"{self._label} must become idle within {self.IDLE_S:g} s, not wait for {self._waiting_streams()}: "
                    "load its bitstream again, or reset the card"
                )
            self.pause()
        self.write("control", control.pack({"ap_continue": 1}))

    def close(self) -> None:
        """Wait for what runs, as far as the card answers, and give it back. May be called twice."""
        if self._open:
            with suppress(DeviceError):  # gone or stuck: nothing more can be done from here
                super().close()
            self._open = False
            with suppress(DeviceError):
                self.release()


class LogicDevice(BoardDevice):
    """A kernel in the logic beside the processors that this runs on, which load it. A backend adds `load_and_open`."""

    BACKEND: ClassVar[str]

    @classmethod
    @abstractmethod
    def load_and_open(cls, config: str, *, again: bool) -> Self:
        """Load the bitstream where it is not the one that is loaded, or `again`, and open the kernel in it."""

    @classmethod
    def open(cls, config: str) -> Self:
        """Load the bitstream, unless it is the one that is loaded, and open the kernel in it.

        Raises UnknownDeviceError where the board or what loads it is missing, BitstreamError, ConfigError, DigestError,
        DeviceError where this user or this board may not load it, no memory for buffers is there, another process has
        the board, or its clock is off.
        """
        return cls.load_and_open(config, again=False)

    @classmethod
    def load(cls, config: str) -> Self:
        """Load the bitstream in any case and open the kernel in it. Raises as `open`."""
        return cls.load_and_open(config, again=True)

    @classmethod
    def open_card(cls, config: str, card: str) -> Device:
        """Open the board of another machine, [USER@]HOST as ssh has it (nearflash.device.backends.remote)."""
        return RemoteDevice.connect(cls.BACKEND, config, card)
