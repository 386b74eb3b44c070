"""The interface of every device: buffers in device memory, commands, completions.

A training or inference script sees only this. Backends are peers, found by name (`open_device`); none stands in for
another.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import AddressError, UnknownDeviceError
from nearflash.abi.kernel.commands import Command, Completion
from nearflash.abi.kernel.config import KernelConfig
from nearflash.abi.python310 import Self
from nearflash.support.closing import Closing

__all__ = ["Buffer", "Device", "Identity", "LinkBytes"]


@dataclass(frozen=True)
class Identity:
    """A device's report of itself in its identity block."""

    backend: str
    config: KernelConfig
    digest64: int
    abi_version: int
    git_revision: int
    card: str = ""
    """Which of several cards, as the backend names them; empty where there is one."""

    @property
    def name(self) -> str:
        """Name that opens this device again, for example `verilator:update-tiny`."""
        return f"{self.backend}:{self.config.full_name}" + (f"@{self.card}" if self.card else "")


@dataclass
class LinkBytes:
    """Bytes that explicit syncs moved over the host link since the device was opened."""

    to_device: int = 0
    from_device: int = 0


class Buffer(ABC):
    """A range of device memory with two views.

    `host` is the host's copy: writes to it reach the device at `sync_to_device`, the device's results reach it at
    `sync_from_device`; both are counted as host-link traffic. `p2p` is the device memory itself, page aligned, for
    direct I/O between flash and device that does not cross the host link; None where a device has no such window.
    """

    address: int
    """Device byte address, a multiple of 4096."""
    size_bytes: int
    host: NDArray[np.uint8]
    p2p: NDArray[np.uint8] | None

    @abstractmethod
    def sync_to_device(self, offset: int = 0, size_bytes: int | None = None) -> None:
        """Copy host bytes [offset, offset + size_bytes) down. Raises AddressError outside the buffer."""

    @abstractmethod
    def sync_from_device(self, offset: int = 0, size_bytes: int | None = None) -> None:
        """Copy device bytes [offset, offset + size_bytes) up. Raises AddressError outside the buffer."""

    def span(self, offset: int, size_bytes: int | None) -> slice:
        """The byte range as a slice. Raises AddressError outside the buffer."""
        size_bytes = self.size_bytes - offset if size_bytes is None else size_bytes
        if offset < 0 or size_bytes < 0 or offset + size_bytes > self.size_bytes:
            raise AddressError(
                f"range must lie in the buffer's {self.size_bytes} bytes, not [{offset}, {offset + size_bytes})"
            )
        return slice(offset, offset + size_bytes)


class Device(Closing, ABC):
    """A near-storage device. Use as a context manager; not safe for use by several threads at once."""

    QUICK_TO_OPEN: ClassVar[bool] = False
    """Opening builds nothing and touches no board: a list of devices may try it."""
    HAS_LINK: ClassVar[bool] = True
    """Buffers are synchronised over a link that is slower than the host's memory: fewer bytes are worth some work."""
    DEPTH: ClassVar[int] = 1
    """Commands that may be started and not yet ended; one more submit waits for the oldest."""
    DEFAULT_BUILD: ClassVar[str] = "tiny"
    """Configuration, without its kernel, that a backend's name alone stands for."""
    identity: Identity
    links: LinkBytes

    @classmethod
    @abstractmethod
    def open(cls, config: str) -> Self:
        """Open the device with this build configuration (`update-tiny`). Raises ConfigError, DigestError."""

    @classmethod
    def load(cls, config: str) -> Self:
        """Open as `open`; where a bitstream is loaded, it is loaded again. Raises as `open`."""
        return cls.open(config)

    @classmethod
    def open_card(cls, config: str, card: str) -> "Device":
        """Open one of several cards, named as in `Identity.card`. Raises as `open`, and where a backend has none."""
        raise UnknownDeviceError(f"a card can be named for a backend with cards only, not with {config}@{card}")

    @classmethod
    def presence(cls) -> str:
        """State what this machine has; opens nothing. Raises UnknownDeviceError, which names what is missing."""
        return "installed"

    @property
    def memory_bytes(self) -> int:
        """Size of the device's memory; 0 where that is not known."""
        return 0

    @abstractmethod
    def allocate(self, size_bytes: int) -> Buffer:
        """A page-aligned buffer in device memory. Raises AddressError when the memory is full."""

    @abstractmethod
    def free(self, buffer: Buffer) -> None:
        """Give the buffer's memory back; its views must not be used afterwards."""

    @abstractmethod
    def submit(self, command: Command) -> int:
        """Start a command and return its ticket.

        Raises CommandError, AlignmentError or AddressError, before anything started, for a command whose ranges lie
        outside the allocated memory or that the kernel would refuse.
        """

    @abstractmethod
    def wait(self, ticket: int, timeout_s: float = 60.0) -> Completion:
        """Block until the command has ended.

        Raises DeviceError when it ended with a fault, WaitTimeoutError (naming the waiting streams where the device
        reports them) when it did not end in time; outputs of such a command must not be used.
        """

    @abstractmethod
    def reset(self) -> None:
        """Abort what runs and return to idle; memory contents stay."""

    @abstractmethod
    def close(self) -> None:
        """Release the device; it may be called twice."""

    def run(self, command: Command, timeout_s: float = 60.0) -> Completion:
        """Submit and wait."""
        return self.wait(self.submit(command), timeout_s)
