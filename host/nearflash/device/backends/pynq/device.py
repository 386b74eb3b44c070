"""Device `pynq`: a kernel in the logic of a Zynq, under the PYNQ that runs on its processors.

`pynq:update-pynq-z2` loads the bitstream of the manifest `bitstreams/pynq-z2/update.json`, or below the folder that
NEARFLASH_BITSTREAMS names, and finds the kernel in the .hwh beside it; `pynq:update-pynq-z2@HOST` does so on that
machine, over ssh. One process at a time has the board; what it loaded is not loaded again by the next one. Completion
comes by interrupt where Linux has a userspace I/O file for the first interrupt of the logic (PYNQ's images call it
`fabric`); else it is polled.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

from nearflash.abi.errors import DeviceError, NearflashError, UnknownDeviceError
from nearflash.abi.kernel.commands import Completion
from nearflash.abi.kernel.config import KernelConfig
from nearflash.abi.kernel.config import config as named_config
from nearflash.abi.python310 import Self
from nearflash.device.backends.board import LogicDevice, use_p2p, verify_build
from nearflash.device.backends.pynq.clock import SLCR_ADDRESS, SLCR_BYTES, check_part, check_port, find_crystal_hz
from nearflash.device.backends.pynq.interrupt import UioInterrupt
from nearflash.device.backends.pynq.lock import BoardLock
from nearflash.device.backends.pynq.memory import PynqMemory
from nearflash.device.bitstreams import BuildManifest, load_board
from nearflash.device.bitstreams.contents import device_code
from nearflash.device.bitstreams.header import split_bit
from nearflash.device.memory import PAGE_BYTES

__all__ = ["PynqDevice"]

VENDOR = "nearflash:kernel"
"""Vendor and library of our cores in a .hwh; the name is the kernel's."""
UIO_NAME = "fabric"
ZYNQ_7000 = "armv7l"
ARCHITECTURES = {"processing_system7": ZYNQ_7000, "zynq_ultra_ps_e": "aarch64"}
"""Machine that Linux reports, by the processing system that a design was made for."""


class PynqDevice(LogicDevice):
    """The kernel whose registers are `mmio`. `interrupt` is None where completion is polled."""

    BACKEND: ClassVar[str] = "pynq"
    DEFAULT_BUILD: ClassVar[str] = "pynq-z2"
    LOCK: ClassVar[Path] = Path("/run/nearflash-pynq.lock")
    """The board's lock file."""
    INTERRUPT_S = 0.1
    """How long a poll sleeps for the interrupt, s."""

    def __init__(
        self, config: KernelConfig, mmio: Any, memory: PynqMemory, interrupt: UioInterrupt | None = None
    ) -> None:
        self._mmio, self.memory, self._interrupt = mmio, memory, interrupt
        self._held = ExitStack()
        super().__init__(self.BACKEND, config, memory)
        if interrupt:
            self._enable_interrupt()

    @classmethod
    def load_and_open(cls, config: str, *, again: bool) -> Self:
        """See LogicDevice.load_and_open. Raises as `open`."""
        build = named_config(config)
        pynq = _pynq()
        manifest = verify_build(build)
        board = _device(pynq)
        with ExitStack() as held:
            lock = BoardLock(cls.LOCK)
            held.callback(lock.close)
            core = _load(pynq, manifest, lock, again=again)

            def allocate(size_bytes: int) -> Any:
                return pynq.allocate(shape=(size_bytes,), dtype="u1", target=board)

            memory = PynqMemory(allocate, load_board(build.name).memory.size_bytes, p2p=use_p2p())
            interrupt = _interrupt(pynq)
            try:
                device = cls(build, core, memory, interrupt)
            except NearflashError:
                lock.note_loaded("")  # it is another's bitstream, or none that answers
                if interrupt:
                    interrupt.close()
                raise
            device.clock_hz, device._held = manifest.clock_hz, held.pop_all()
            return device

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
        """Free all buffers, the interrupt and the board; the bitstream stays loaded."""
        with self._held as steps:
            if self._interrupt:
                steps.callback(self._interrupt.close)
            self.memory.close()

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
    except ValueError as broken:  # pynqmetadata 0.1.2, of PYNQ 3.0, under Python 3.11
        raise UnknownDeviceError(
            f"device 'pynq' needs a PYNQ that this Python can import: {broken}; run the image's own Python, in which "
            "`nearflash-board` is installed (make board-wheel)"
        ) from broken
    return pynq


def _device(pynq: Any) -> Any:
    try:
        return pynq.Device.active_device
    except RuntimeError as missing:
        raise UnknownDeviceError(
            "device 'pynq' needs a board: PYNQ finds none here; run as root on a Zynq with PYNQ's image, with "
            "XILINX_XRT set (`sudo -E`)"
        ) from missing


def _load(pynq: Any, manifest: BuildManifest, lock: BoardLock, *, again: bool) -> Any:
    """Registers of the kernel in a bitstream, which is loaded where it is not, or `again`."""
    device, path = _device(pynq), manifest.file(".bit")
    name = f"{manifest.files[path.name]} {path}"
    is_loaded = lock.loaded == name and _find_loaded(pynq) == str(path)
    try:
        overlay = pynq.Overlay(str(path), download=False, device=device)
        expected = ARCHITECTURES.get(overlay.parser.family_ps, "another")
        if device.arch != expected:
            raise DeviceError(
                f"{path} must be for the board that loads it, not for a {overlay.parser.family_ps} ({expected}): this "
                f"is {device.name}, {device.arch}; name the build of this board"
            )
        slcr = pynq.MMIO(SLCR_ADDRESS, SLCR_BYTES, device=device) if expected == ZYNQ_7000 else None
        if slcr is not None:
            check_part(lambda offset: int(slcr.read(offset)), device_code(split_bit(path)[1]), str(path))
        if again or not is_loaded or not _can_allocate(pynq, device):
            lock.note_loaded("")
            overlay.download()
            lock.note_loaded(name)
    except OSError as error:
        # PYNQ raises it without a number for a user that is not root.
        raise DeviceError(
            f"{path} must be loaded by root, to a board that takes it, not fail: {error}; use `sudo -E`"
        ) from error
    core = _core(overlay, path, manifest.kernel)
    if slcr is not None:
        first = f"register 0 at {core['phys_addr']:#x}"
        check_port(lambda offset: int(slcr.read(offset)), manifest.clock_hz, first, find_crystal_hz())
    return pynq.MMIO(core["phys_addr"], core["addr_range"], device=device)


def _can_allocate(pynq: Any, device: Any) -> bool:
    """Whether PYNQ gives memory to a process that has loaded nothing: XRT may want its own metadata first."""
    try:
        pynq.allocate(shape=(PAGE_BYTES,), dtype="u1", target=device).freebuffer()
    except (MemoryError, RuntimeError, OSError):
        return False
    return True


def _find_loaded(pynq: Any) -> str:
    """The bitstream that PYNQ loaded last, in this process or another; empty where it knows of none."""
    try:
        return str(pynq.PL.bitfile_name or "")
    except (OSError, ValueError):  # the file is gone, or what PYNQ noted of it is damaged
        return ""


def _core(overlay: Any, path: Path, kernel: str) -> Any:
    """PYNQ's entry of the one kernel of an overlay."""
    matches = [core for core in overlay.ip_dict.values() if str(core["type"]).startswith(f"{VENDOR}:{kernel}:")]
    if len(matches) != 1:
        raise DeviceError(
            f"{path.with_suffix('.hwh')} must have one core {VENDOR}:{kernel}, not {len(matches)} "
            f"among {', '.join(str(core['type']) for core in overlay.ip_dict.values())}: build it again"
        )
    return matches[0]


def _interrupt(pynq: Any) -> UioInterrupt | None:
    try:
        path = pynq.uio.get_uio_device(UIO_NAME)
        return UioInterrupt(Path(path)) if path else None
    except OSError:
        return None  # no userspace I/O here, or not for this user: completion is polled
