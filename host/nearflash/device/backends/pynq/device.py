"""Device `pynq`: a kernel in the logic of a Zynq, under the PYNQ that runs on its processors.

`pynq:update-pynq-z2` loads the bitstream of the manifest `bitstreams/pynq-z2/update.json`, or below the folder that
NEARFLASH_BITSTREAMS names, and finds the kernel in the .hwh beside it. Completion comes by interrupt where Linux has a
userspace I/O file for the first interrupt of the logic (PYNQ's images call it `fabric`); else it is polled.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, Self

from nearflash.abi.errors import DeviceError, NearflashError, UnknownDeviceError
from nearflash.abi.kernel.commands import Completion
from nearflash.abi.kernel.config import KernelConfig
from nearflash.abi.kernel.config import config as named_config
from nearflash.device.backends.board import BoardDevice, bitstream, use_p2p
from nearflash.device.backends.pynq.interrupt import UioInterrupt
from nearflash.device.backends.pynq.memory import PynqMemory
from nearflash.device.bitstreams import load_board

__all__ = ["PynqDevice"]

VENDOR = "nearflash:kernel"
"""Vendor and library of our cores in a .hwh; the name is the kernel's."""
UIO_NAME = "fabric"
ARCHITECTURES = {"processing_system7": "armv7l", "zynq_ultra_ps_e": "aarch64"}
"""Machine that Linux reports, by the processing system that a design was made for."""


class PynqDevice(BoardDevice):
    """The kernel whose registers are `mmio`. `interrupt` is None where completion is polled."""

    DEFAULT_BUILD: ClassVar[str] = "pynq-z2"
    INTERRUPT_S = 0.1
    """How long a poll sleeps for the interrupt, s."""

    def __init__(
        self, config: KernelConfig, mmio: Any, memory: PynqMemory, interrupt: UioInterrupt | None = None
    ) -> None:
        self._mmio, self.memory, self._interrupt = mmio, memory, interrupt
        super().__init__("pynq", config, memory)
        if interrupt:
            self._enable_interrupt()

    @classmethod
    def open(cls, config: str) -> Self:
        """Load the bitstream and open the kernel in it.

        Raises UnknownDeviceError where PYNQ or its board is missing, BitstreamError, ConfigError, DigestError,
        DeviceError where this user or this board may not load it.
        """
        build = named_config(config)
        pynq = _pynq()
        path = bitstream(build, ".bit")
        overlay, core = _load(pynq, path, build.kernel)
        device = overlay.device

        def allocate(size_bytes: int) -> Any:
            return pynq.allocate(shape=(size_bytes,), dtype="u1", target=device)

        memory = PynqMemory(allocate, load_board(build.name).memory.size_bytes, p2p=use_p2p())
        interrupt = _interrupt(pynq)
        try:
            return cls(build, core.mmio, memory, interrupt)
        except NearflashError:
            if interrupt:
                interrupt.close()
            raise

    @classmethod
    def presence(cls) -> str:
        """The board's name. Raises UnknownDeviceError where PYNQ or its board is missing."""
        return f"board {_device(_pynq()).name}"

    def read_word(self, offset: int) -> int:
        """The 32-bit register at a byte offset."""
        return int(self._mmio.read(offset))

    def write_register(self, offset: int, value: int) -> None:
        """Write the 32-bit register at a byte offset."""
        self._mmio.write(offset, value)

    def pause(self) -> None:
        """Sleep until the interrupt comes, for a moment where there is none."""
        if self._interrupt:
            self._interrupt.wait(self.INTERRUPT_S)
        else:
            super().pause()

    def release(self) -> None:
        """Free all buffers and the interrupt; the bitstream stays loaded."""
        with ExitStack() as steps:
            if self._interrupt:
                steps.callback(self._interrupt.close)
            steps.callback(self.memory.close)

    def _finish(self, timeout_s: float) -> Completion:
        try:
            return super()._finish(timeout_s)
        finally:
            if self._interrupt:
                self._clear_interrupt()

    def _enable_interrupt(self) -> None:
        self.write("interrupt_mask", self._map["interrupt_mask"].pack({"done": 1}))
        self.write("interrupt_enable", self._map["interrupt_enable"].pack({"enable": 1}))

    def _clear_interrupt(self) -> None:
        status = self._map["interrupt_status"]
        if status.unpack(self.read("interrupt_status"))["done"]:
            self.write("interrupt_status", status.pack({"done": 1}))  # toggles


def _pynq() -> Any:
    try:
        import pynq
    except ImportError as missing:
        raise UnknownDeviceError(
            f"device 'pynq' needs the package {missing.name!r}: run on a board with PYNQ's image, or install it in a "
            "virtual environment of its own (pip install 'pynq>=3')"
        ) from missing
    return pynq


def _device(pynq: Any) -> Any:
    try:
        return pynq.Device.active_device
    except RuntimeError as missing:
        raise UnknownDeviceError(
            "device 'pynq' needs a board: PYNQ finds none here; run as root on a Zynq with PYNQ's image, with "
            "XILINX_XRT set (`sudo -E`)"
        ) from missing


def _load(pynq: Any, path: Path, kernel: str) -> tuple[Any, Any]:
    """The overlay of a bitstream, loaded, and the driver of the kernel in it."""
    device = _device(pynq)
    try:
        overlay = pynq.Overlay(str(path), download=False, device=device)
        expected = ARCHITECTURES.get(overlay.parser.family_ps, "another")
        if device.arch != expected:
            raise DeviceError(
                f"{path} must be for the board that loads it, not for a {overlay.parser.family_ps} ({expected}): this "
                f"is {device.name}, {device.arch}; name the build of this board"
            )
        overlay.download()
    except OSError as error:
        # PYNQ raises it without a number for a user that is not root.
        raise DeviceError(
            f"{path} must be loaded by root, to a board that takes it, not fail: {error}; use `sudo -E`"
        ) from error
    cores = {name: str(entry["type"]) for name, entry in overlay.ip_dict.items()}
    matches = [name for name, kind in cores.items() if kind.startswith(f"{VENDOR}:{kernel}:")]
    if len(matches) != 1:
        raise DeviceError(
            f"{path.with_suffix('.hwh')} must have one core {VENDOR}:{kernel}, not {len(matches)} "
            f"among {', '.join(cores.values())}: build it again"
        )
    return overlay, getattr(overlay, matches[0])


def _interrupt(pynq: Any) -> UioInterrupt | None:
    try:
        path = pynq.uio.get_uio_device(UIO_NAME)
        return UioInterrupt(Path(path)) if path else None
    except OSError:
        return None  # no userspace I/O here, or not for this user: completion is polled
