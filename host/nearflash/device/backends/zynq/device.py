"""Device `zynq`: a kernel in the logic of a Zynq-7000, under a Linux that need not be PYNQ's.

`zynq:expand-zynq7010` loads the bitstream of the manifest `bitstreams/zynq7010/expand.json` by the kernel's FPGA
manager, sets FCLK0, and drives the registers by /dev/mem, all as root. Buffers lie in u-dma-buf's memory or in what
the device tree sets apart. Completion is polled. It runs the bitstreams of any board with the same device:
`zynq:update-pynq-z2` on a PYNQ-Z1 or a Zybo Z7-20. `zynq:expand-zynq7010@HOST` does so on that machine, over ssh.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from nearflash.abi.errors import NearflashError
from nearflash.abi.kernel.config import KernelConfig
from nearflash.abi.kernel.config import config as named_config
from nearflash.abi.python310 import Self
from nearflash.device.backends.board import LogicDevice, verify_build
from nearflash.device.backends.pynq.clock import (
    SLCR_ADDRESS,
    SLCR_BYTES,
    check_part,
    check_port,
    find_crystal_hz,
    set_clock,
)
from nearflash.device.backends.pynq.lock import BoardLock
from nearflash.device.backends.zynq.manager import FpgaManager
from nearflash.device.backends.zynq.physical import PhysicalMemory, Words
from nearflash.device.backends.zynq.region import RegionMemory, find_region
from nearflash.device.bitstreams import BuildManifest
from nearflash.device.bitstreams.contents import device_code
from nearflash.device.bitstreams.header import split_bit

__all__ = ["CONTROL_ADDRESS", "BoardFiles", "ZynqDevice"]

CONTROL_ADDRESS = 0x4000_0000
"""Of the kernel's registers: the first of M_AXI_GP0."""
_PORTS_ADDRESS, _PORTS_BYTES = 0xF800_8000, 0x2000
_PORT_WIDTHS = (0x0000, 0x0014, 0x1000, 0x1014)
"""AFI_RDCHAN_CTRL and AFI_WRCHAN_CTRL of HP0 and HP1, whose bit 0 makes the port 32 bits wide (UG585, B.3)."""
_REACHED_BYTES = 1 << 30
"""Addresses of DDR that the logic's ports reach."""


@dataclass(frozen=True)
class BoardFiles:
    """Files by which Linux shows the board."""

    manager: Path = Path("/sys/class/fpga_manager/fpga0")
    firmware: Path = Path("/lib/firmware")
    memory: Path = Path("/dev/mem")
    devices: Path = Path("/dev")
    buffers: Path = Path("/sys/class/u-dma-buf")
    tree: Path = Path("/proc/device-tree")
    lock: Path = Path("/run/nearflash-pynq.lock")
    """That of `pynq`, whose logic it is, too."""

    def physical(self) -> PhysicalMemory:
        """Physical memory."""
        return PhysicalMemory(self.memory)


class ZynqDevice(LogicDevice):
    """The kernel whose registers are `words`."""

    BACKEND: ClassVar[str] = "zynq"
    DEFAULT_BUILD: ClassVar[str] = "pynq-z2"
    FILES: ClassVar[BoardFiles] = BoardFiles()

    def __init__(self, config: KernelConfig, words: Words, memory: RegionMemory) -> None:
        self._words, self.memory = words, memory
        self._held = ExitStack()
        super().__init__(self.BACKEND, config, memory)

    @classmethod
    def presence(cls) -> str:
        """The FPGA manager's folder. Raises UnknownDeviceError where there is no FPGA manager."""
        FpgaManager(cls.FILES.manager, cls.FILES.firmware)
        return f"FPGA manager {cls.FILES.manager}"

    @classmethod
    def load_and_open(cls, config: str, *, again: bool) -> Self:
        """See LogicDevice.load_and_open. Raises as `open`."""
        build, files = named_config(config), cls.FILES
        manager = FpgaManager(files.manager, files.firmware)
        manifest = verify_build(build)
        physical, region = files.physical(), find_region(files.devices, files.buffers, files.tree)
        region.check(_REACHED_BYTES)
        with ExitStack() as held:
            lock = BoardLock(files.lock)
            held.callback(lock.close)
            clock_hz = _configure(manifest, manager, physical, lock, find_crystal_hz(files.tree), again=again)
            storage = physical.map_bytes(0 if region.path else region.address, region.size_bytes, region.path)
            words = physical.map_words(CONTROL_ADDRESS, build.registers.size_bytes)
            try:
                device = cls(build, words, RegionMemory(region, storage))
            except NearflashError:
                lock.note_loaded("")  # it is another's bitstream, or none that answers
                raise
            device.clock_hz, device._held = clock_hz, held.pop_all()
            return device

    def read_word(self, offset: int) -> int:
        """The 32-bit register at a byte offset."""
        return self._words.read(offset)

    def write_register(self, offset: int, value: int) -> None:
        """Write the 32-bit register at a byte offset."""
        self._words.write(offset, value)

    def release(self) -> None:
        """Free all buffers and the board; the bitstream stays loaded."""
        with self._held:
            self.memory.close()


def _configure(
    manifest: BuildManifest,
    manager: FpgaManager,
    physical: PhysicalMemory,
    lock: BoardLock,
    crystal_hz: int,
    *,
    again: bool,
) -> int:
    """Load a bitstream where it is not, or `again`, and bring clock and ports up; the clock, Hz."""
    path = manifest.file(".bit")
    payload = split_bit(path)[1]
    slcr = physical.map_words(SLCR_ADDRESS, SLCR_BYTES)
    check_part(slcr.read, device_code(payload), str(path))
    name = f"{manifest.files[path.name]} {path}"
    if again or lock.loaded != name:
        lock.note_loaded("")
        manager.load(payload)
        lock.note_loaded(name)
    clock_hz = set_clock(slcr.read, slcr.write, manifest.clock_hz, crystal_hz)
    check_port(slcr.read, clock_hz, f"register 0 at {CONTROL_ADDRESS:#x}", crystal_hz)
    ports = physical.map_words(_PORTS_ADDRESS, _PORTS_BYTES)
    for offset in _PORT_WIDTHS:
        ports.write(offset, ports.read(offset) & ~1)
    return clock_hz
