"""A card that is the NVMe host of an ordinary drive: what it moves and how fast, and an update over state on the drive.

    drive ─► NvmeHost ─► buffers (p2p) ─► update kernel ─► buffers (p2p) ─► NvmeHost ─► drive

NvmeHost stands for LiteNVMe's block interface: commands of whole sectors, one direction each, at the rates that its
authors published for an XCKU3P (Gen3 ×4, 8 KiB, 32 commands in flight): a command of n packets of 512 bytes takes
83 + 18.8·n cycles at 125 MHz. The data of a command are moved at once; its cycles are counted, not simulated. The
kernel between them is whatever device is given, simulated cycle by cycle where that is the Verilated one.

Limits: reads and writes take turns (the published rates are of one direction alone); no errors of the drive.
Source: LiteNVMe, doc/NVME_PERFORMANCE.md and doc/STANDALONE_CORE.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.commands import UpdateCommand
from nearflash.abi.errors import AddressError
from nearflash.abi.optimizers import OptimizerStep, StateFormat
from nearflash.device.base import Buffer, Device
from nearflash.device.memory import PAGE_BYTES

__all__ = ["CLOCK_HZ", "SECTOR_BYTES", "NvmeHost", "PathReport", "command_cycles", "update_on_drive"]

CLOCK_HZ = 125_000_000
SECTOR_BYTES = 512
"""Of a sector, and of a packet on the link."""
COMMAND_BYTES = 8192
"""Of a command, where the caller names no size: the published rates are of these."""
COMMAND_BYTES_MAX = 262_144
"""Of the core's staging memory."""
_COMMAND_TENTHS, _PACKET_TENTHS = 830, 188  # of a cycle


def command_cycles(packets: int) -> float:
    """Cycles of a command of so many packets."""
    return (_COMMAND_TENTHS + _PACKET_TENTHS * packets) / 10


class NvmeHost:
    """The core with a drive behind it.

    Parameters
    ----------
    drive : bytes of the drive, whole sectors.
    command_bytes : longest command, bytes; a multiple of 512 up to 256 KiB.

    Raises AddressError for sizes that are not whole sectors.
    """

    def __init__(self, drive: NDArray[np.uint8], command_bytes: int = COMMAND_BYTES) -> None:
        if drive.size % SECTOR_BYTES:
            raise AddressError(f"drive must be whole sectors of {SECTOR_BYTES} bytes, not {drive.size} bytes")
        if command_bytes % SECTOR_BYTES or not SECTOR_BYTES <= command_bytes <= COMMAND_BYTES_MAX:
            raise AddressError(
                f"command_bytes must be whole sectors of up to {COMMAND_BYTES_MAX} bytes, not {command_bytes!r}"
            )
        self.drive = drive
        self.command_bytes = command_bytes
        self.commands = 0
        self.cycles = 0.0
        """Of all commands, at CLOCK_HZ."""
        self.read_bytes = self.written_bytes = 0

    def read(self, sector: int, memory: NDArray[np.uint8]) -> None:
        """Sectors from `sector` on into device memory. Raises AddressError outside the drive."""
        span = self._moved(sector, memory.size)
        memory[:] = self.drive[span]
        self.read_bytes += memory.size

    def write(self, sector: int, memory: NDArray[np.uint8]) -> None:
        """Device memory to the sectors from `sector` on. Raises AddressError outside the drive."""
        span = self._moved(sector, memory.size)
        self.drive[span] = memory
        self.written_bytes += memory.size

    def _moved(self, sector: int, size_bytes: int) -> slice:
        start = sector * SECTOR_BYTES
        if size_bytes % SECTOR_BYTES or not 0 <= start <= start + size_bytes <= self.drive.size:
            raise AddressError(
                f"a transfer must be whole sectors of the drive's {self.drive.size} bytes, not [{start}, "
                f"{start + size_bytes})"
            )
        whole, rest = divmod(size_bytes, self.command_bytes)
        self.commands += whole + (rest > 0)
        self.cycles += whole * command_cycles(self.command_bytes // SECTOR_BYTES)
        self.cycles += command_cycles(rest // SECTOR_BYTES) if rest else 0
        return slice(start, start + size_bytes)


@dataclass(frozen=True)
class PathReport:
    """What an update over state on the drive took."""

    params: int
    kernel_cycles: int
    """At the kernel's clock."""
    drive_cycles: float
    """Of reads and writes, at CLOCK_HZ."""
    commands: int
    """Of the NVMe host."""
    host_bytes: int
    """That crossed the link to the computer: 0."""

    @property
    def params_per_s(self) -> float:
        """Parameters a second where drive and kernel overlap: the slower one's rate, the kernel at CLOCK_HZ too."""
        return self.params * CLOCK_HZ / max(self.drive_cycles, self.kernel_cycles)


def update_on_drive(
    device: Device, host: NvmeHost, rule: OptimizerStep, sectors: Mapping[str, int], params: int, chunk: int
) -> PathReport:
    """One optimizer step over fp32 state on the drive, `chunk` parameters at a time, written back in place.

    sectors : first sector of each array: g, p, and those of the rule. chunk : parameters of each command of the kernel;
    chunks, and `params`, are whole sectors. Nothing of g or the state crosses the host link.

    Raises AddressError for numbers that are not whole sectors or another state format, before anything is moved; and
    what the device raises.
    """
    per_sector = SECTOR_BYTES // 4
    if params % per_sector or chunk % per_sector or chunk < per_sector:
        raise AddressError(f"params and chunk must be multiples of {per_sector}, not {params!r} and {chunk!r}")
    if rule.state_format is not StateFormat.FP32:
        raise AddressError(f"state on the drive must be fp32, not {rule.state_format}")
    names = ("g", "p", *rule.arrays)
    links, start = device.links.to_device + device.links.from_device, host.cycles
    commands, cycles = host.commands, 0
    buffers: dict[str, Buffer] = {}
    try:
        for name in names:
            buffers[name] = device.allocate(-(-4 * chunk // PAGE_BYTES) * PAGE_BYTES)
        for first in range(0, params, chunk):
            count = min(chunk, params - first)
            places = {name: (sectors[name] + first // per_sector, _window(buffers[name], count)) for name in names}
            for sector, memory in places.values():
                host.read(sector, memory)
            addresses = {name: buffers[name].address for name in names}
            outputs = {name: address for name, address in addresses.items() if name != "g"}
            command = UpdateCommand(rule, count, addresses, outputs, first_param=first)
            cycles += device.run(command).counters.get("cycles", 0)
            for name in outputs:
                host.write(*places[name])
    finally:
        for buffer in buffers.values():
            device.free(buffer)
    moved = device.links.to_device + device.links.from_device - links
    return PathReport(params, cycles, host.cycles - start, host.commands - commands, moved)


def _window(buffer: Buffer, count: int) -> NDArray[np.uint8]:
    """The buffer's first `count` parameters in device memory."""
    if buffer.p2p is None:
        raise AddressError("buffers must have a window for direct I/O, as those of a simulated device have")
    window: NDArray[np.uint8] = buffer.p2p[: 4 * count]
    return window
