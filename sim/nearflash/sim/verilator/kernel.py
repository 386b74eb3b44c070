"""A kernel top, Verilated, with memory behind its AXI4 ports: registers, runs, statistics, waves.

The component has `clk` and `rst`, an AXI4-Lite slave `s_axi_control`, AXI4 masters (`m_axi_gmem0`, ...), an output
`interrupt` and optionally a 32-bit input `git_revision` and NAND links. All ports share one memory, page aligned, that
numpy sees and that files opened with O_DIRECT can be read into and written from: the stand-in for a device's
peer-to-peer window.
"""

import ctypes
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import DeviceError
from nearflash.device.memory import anonymous
from nearflash.sim.nand.channel import NandChannel, NandModel, link_names, nand_header
from nearflash.sim.stalls import SimulationTimeout
from nearflash.sim.verilator.build import build_library
from nearflash.sim.verilator.pins import memory_ports, pins_header
from nearflash.sim.verilator.streams import Devices
from nearflash.sim.verilog import Design, convert

__all__ = ["KernelLibrary", "MemoryModel", "PortStatistics", "ProtocolError", "SimulatedBusError"]

_SHIM = Path(__file__).parents[1] / "shims" / "kernel.cpp"
_REGISTER_LIMIT_CYCLES = 1000
_NARROW_BITS = 128
"""Kernels with ports up to this width run as fast where they are compiled for short runs, within the spread."""
_WAITS_BYTES = 1 << 16
_WAITS_SHOWN = 16
_RESPONSES = ("OKAY", "EXOKAY", "SLVERR", "DECERR")
_OUTSTANDING_MAX = 64


class ProtocolError(DeviceError):
    """The kernel broke a rule of AXI4; the text names the port, the cycle and the rule."""


class SimulatedBusError(DeviceError):
    """A register access was answered with SLVERR or DECERR."""


@dataclass(frozen=True)
class MemoryModel:
    """How the memory behaves; rates count reads and writes together, 0 is no limit."""

    read_latency_cycles: int = 32
    """Cycles from an accepted read address to its first data."""
    write_latency_cycles: int = 16
    """Cycles from a burst's last data to its response."""
    port_bytes_per_cycle: float = 0
    """Bandwidth of each port."""
    total_bytes_per_cycle: float = 0
    """Bandwidth of all ports together, shared in turns."""
    outstanding_bursts: int = 32
    """Reads, and writes, that each port may have in flight; 1 to 64."""
    stall_percent: int = 0
    """Chance that a channel pauses for a cycle; 100 never moves."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.read_latency_cycles < 1 or self.write_latency_cycles < 1:
            shortest = min(self.read_latency_cycles, self.write_latency_cycles)
            raise ValueError(f"latencies must be at least 1 cycle, not {shortest}")
        if not 1 <= self.outstanding_bursts <= _OUTSTANDING_MAX:
            raise ValueError(f"outstanding_bursts must be 1 to {_OUTSTANDING_MAX}, not {self.outstanding_bursts!r}")
        if not 0 <= self.stall_percent <= 100:
            raise ValueError(f"stall_percent must be within [0, 100], not {self.stall_percent!r}")
        if min(self.port_bytes_per_cycle, self.total_bytes_per_cycle) < 0:
            slowest = min(self.port_bytes_per_cycle, self.total_bytes_per_cycle)
            raise ValueError(f"rates must be 0 (no limit) or more bytes per cycle, not {slowest}")


class _Settings(ctypes.Structure):
    """Mirrors MemorySettings in memory.hpp."""

    _fields_ = [
        ("read_latency_cycles", ctypes.c_uint64),
        ("write_latency_cycles", ctypes.c_uint64),
        ("port_bytes_per_cycle", ctypes.c_double),
        ("total_bytes_per_cycle", ctypes.c_double),
        ("outstanding_bursts", ctypes.c_uint64),
        ("stall_percent", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
    ]


class PortStatistics(ctypes.Structure):
    """Traffic of one memory port since the library was made: whole beats, strobed or not."""

    read_bytes: int
    written_bytes: int
    read_bursts: int
    write_bursts: int
    _fields_ = [(name, ctypes.c_uint64) for name in ("read_bytes", "written_bytes", "read_bursts", "write_bursts")]


class KernelLibrary:
    """`component`, or a converted design, as a library with `memory_bytes` of memory at `base_address`.

    `name` names the library in the build cache. `trace` compiles waves in, which makes the model several times slower
    and another entry of the cache.

    Raises ValueError for a component without the ports above or a size that is no multiple of 4,096, BuildError (see
    nearflash.sim.verilator.build) where a tool fails.
    """

    def __init__(
        self,
        component: Any,
        name: str,
        *,
        memory_bytes: int,
        base_address: int = 0x1000_0000,
        model: MemoryModel | None = None,
        nand: NandModel | None = None,
        git_revision: int = 0,
        trace: bool = False,
    ) -> None:
        if memory_bytes <= 0 or memory_bytes % mmap.PAGESIZE:
            raise ValueError(f"memory_bytes must be a positive multiple of {mmap.PAGESIZE}, not {memory_bytes!r}")
        design = component if isinstance(component, Design) else convert(component)
        self.port_names = memory_ports(design)
        links = link_names(design.ports)
        if bool(links) != bool(nand):
            raise ValueError(f"nand must be given for a design with NAND links, and only then; it has {len(links)}")
        devices = nand_header(design) + "using Devices = NandDevices;\n" if links else Devices().header
        path = build_library(
            design,
            name=name + ("-trace" if trace else ""),
            shim=_SHIM,
            headers={"pins.hpp": pins_header(design), "devices.hpp": devices},
            trace=trace,
            show_streams=True,
            batch=True,
            brief=max(port.width for port in design.ports) <= _NARROW_BITS,
        )
        self._library = _declare(ctypes.CDLL(str(path)))
        self.base_address = base_address
        #: The device's memory; index 0 is `base_address`. It outlives the library.
        self.memory: NDArray[np.uint8] = anonymous(memory_bytes)
        self._kernel: int | None = self._library.kernel_new(
            self.memory.ctypes.data, memory_bytes, base_address, git_revision
        )
        self.configure(model or MemoryModel())
        self.channels = tuple(
            NandChannel(self._library, self._call("device", index), nand) for index in range(len(links)) if nand
        )

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Free the simulator; the memory stays as long as someone looks at it. May be called twice."""
        if getattr(self, "_kernel", None):
            self._call("free")
            self._kernel = None

    def reset(self) -> None:
        """Hold the reset for four cycles: what was in flight is dropped, memory and statistics stay."""
        self._call("reset")

    def configure(self, model: MemoryModel) -> None:
        """Set latency, bandwidth and stalls; also while bursts are in flight."""
        values = [getattr(model, field[0]) for field in _Settings._fields_]
        self._call("configure", ctypes.byref(_Settings(*values)))

    def write_register(self, offset_bytes: int, value: int) -> None:
        """Write one 32-bit register; time goes on meanwhile.

        Raises BusError for an error response, SimulationTimeout where none comes within 1,000 cycles.
        """
        response = self._call("write", offset_bytes, value, _REGISTER_LIMIT_CYCLES)
        self._check_response(response, f"write of register {offset_bytes:#x}")

    def read_register(self, offset_bytes: int) -> int:
        """Read one 32-bit register; time goes on meanwhile. Raises as `write_register` does."""
        value = ctypes.c_uint32()
        limit = _REGISTER_LIMIT_CYCLES
        response = self._call("read", offset_bytes, ctypes.byref(value), limit)
        self._check_response(response, f"read of register {offset_bytes:#x}")
        return value.value

    def run(self, limit_cycles: int) -> int:
        """Run until the interrupt is high and return the cycles that took.

        Raises SimulationTimeout after `limit_cycles`, naming every memory channel and inner stream that waits;
        ProtocolError where the kernel broke a rule of AXI4.
        """
        cycles = self.advance(limit_cycles, until_interrupt=True)
        if not self.interrupt:
            raise SimulationTimeout(f"no interrupt within {limit_cycles} cycles: {self.waits_text()}")
        return cycles

    def advance(self, limit_cycles: int, *, until_interrupt: bool = False) -> int:
        """Run for `limit_cycles`, or less where the interrupt ends it; return the cycles.

        Raises ProtocolError, NandViolation (see nearflash.sim.nand.channel).
        """
        cycles = int(self._call("run", limit_cycles, until_interrupt))
        self._check_protocol()
        return cycles

    @property
    def interrupt(self) -> bool:
        """Whether the interrupt is high."""
        return bool(self._call("interrupt"))

    @property
    def cycles(self) -> int:
        """Clock cycles since the library was made, those of register accesses among them, resets not."""
        return int(self._call("cycles"))

    def statistics(self) -> dict[str, PortStatistics]:
        """Read the traffic by memory port."""
        counts = (PortStatistics * len(self.port_names))()
        self._call("statistics", counts)
        return dict(zip(self.port_names, counts, strict=True))

    def waits(self) -> list[str]:
        """Name what waits in this cycle: memory channels first, then streams inside the kernel, outer ones first."""
        text = ctypes.create_string_buffer(_WAITS_BYTES)
        self._call("waits", text, _WAITS_BYTES)
        return text.value.decode().split("; ")[:-1]

    def waits_text(self) -> str:
        """Text of what waits for what in the kernel, for an error: the first of `waits`, and how many more."""
        found = self.waits()
        rest = [f"and {len(found) - _WAITS_SHOWN} more"] if len(found) > _WAITS_SHOWN else []
        return "; ".join([*found[:_WAITS_SHOWN], *rest]) or "nothing waits"

    def start_trace(self, path: Path, cycles: int, delay_cycles: int = 0) -> None:
        """Write the waves of `cycles` cycles, `delay_cycles` from now on, to `path` (VCD).

        Raises ValueError for a library without `trace`.
        """
        if not self._call("trace", str(path).encode(), self.cycles + delay_cycles, cycles):
            raise ValueError("the library must be made with trace=True, not without, to write waves")

    def stop_trace(self) -> None:
        """Close the wave file."""
        self._call("trace_close")

    def _call(self, function: str, *arguments: Any) -> Any:
        if self._kernel is None:
            raise ValueError("the kernel library must be open, not closed")
        return getattr(self._library, f"kernel_{function}")(self._kernel, *arguments)

    def _check_response(self, response: int, what: str) -> None:
        self._check_protocol()
        if response < 0:
            raise SimulationTimeout(
                f"{what} had no response within {_REGISTER_LIMIT_CYCLES} cycles: {self.waits_text()}"
            )
        if response >= 2:
            raise SimulatedBusError(f"{what} must be answered with OKAY, not {_RESPONSES[response]}")

    def _check_protocol(self) -> None:
        error = self._call("error")
        if error:
            raise ProtocolError(error.decode())
        for channel in self.channels:
            channel.check()


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare every function of kernel.cpp, so that 64-bit arguments arrive whole."""
    pointer, word, integer = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int
    functions: dict[str, tuple[Any, ...]] = {
        "kernel_new": (pointer, pointer, word, word, ctypes.c_uint32),
        "kernel_free": (None, pointer),
        "kernel_reset": (None, pointer),
        "kernel_configure": (None, pointer, pointer),
        "kernel_write": (integer, pointer, ctypes.c_uint32, ctypes.c_uint32, word),
        "kernel_read": (integer, pointer, ctypes.c_uint32, pointer, word),
        "kernel_device": (pointer, pointer, integer),
        "kernel_run": (word, pointer, word, integer),
        "kernel_interrupt": (integer, pointer),
        "kernel_cycles": (word, pointer),
        "kernel_error": (ctypes.c_char_p, pointer),
        "kernel_statistics": (None, pointer, pointer),
        "kernel_waits": (None, pointer, ctypes.c_char_p, integer),
        "kernel_trace": (integer, pointer, ctypes.c_char_p, word, word),
        "kernel_trace_close": (None, pointer),
    }
    for name, (result, *arguments) in functions.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
