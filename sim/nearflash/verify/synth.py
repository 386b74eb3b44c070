"""Resources and logic depth of kernels, estimated by Yosys for AMD/Xilinx families.

What is counted: LUT = LUT1..LUT6, inverters, shift-register LUTs and LUT RAM (by the LUTs that each primitive takes);
FF = flip-flops; BRAM36 = block RAMs, an 18 Kb one as half; DSP = DSP48 slices. `logic_depth` is the longest register to
register path in LUT levels; a CARRY4 counts a quarter of a level, a wide multiplexer half, a DSP slice that has no
registers four; what is written to LUT RAM, its address, and operands that a DSP slice registers end at the clock.
`path` names the register or memory that the path comes from, the cells along it, each by the signal that it drives,
where synthesis kept the signal's name, and where it ends.

The equal parts of a kernel (lanes, channels) are synthesised once and counted as often as there are, the rest around
them as black boxes with all of their ports, which are not even elaborated: a fraction of the time, and the same cells
but for what equal parts could share or leave open (an upper bound).
The longest path is the longer one of both. Between lanes and rest there are only wires from or to registers; a
channel's streams also have logic on both sides, and a path through both is not seen.

The mapper is told that wires are slow (_WIRE_PS), so that it looks for few levels: by its own delays the read of a
block RAM takes as long as five levels, and it lets all other paths have as many.

Limits: estimates before placement. Yosys maps UltraScale+ carries to CARRY4 and packs DSP blocks less tightly than
vendor tools. No timing is claimed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from amaranth import Elaboratable, Instance, Module, Value
from amaranth.back import rtlil
from amaranth.lib import wiring
from amaranth.lib.wiring import In

from nearflash.abi.errors import ConfigError
from nearflash.abi.kernel.config import AttendConfig, ExpandConfig, KernelConfig, UpdateConfig, config_of
from nearflash.abi.registers import FACTOR_BITS

__all__ = ["FAMILIES", "UnitResources", "command", "kernel_resources", "resources", "run"]

_EXAMPLES = """examples:
  nearflash synth update --family xcup --config smartssd
  nearflash synth attend --family xc7 --config zynq7045 --json
"""
_WIRE_PS = 1500
"""Delay of a wire that mapping reckons with."""
FAMILIES = {"xc7": "7-series and Zynq-7000", "xcup": "UltraScale+"}

_LUTS_PER_CELL = {
    **{f"LUT{n}": 1 for n in range(1, 7)}, "INV": 1, "SRL16E": 1, "SRLC32E": 1, "RAM32X1D": 2, "RAM64X1D": 2,
    "RAM32M": 4, "RAM64M": 4, "RAM32M16": 8, "RAM64M8": 8, "RAM128X1D": 4, "RAM256X1D": 8,
}  # fmt: skip
_LEVELS = {
    **dict.fromkeys(_LUTS_PER_CELL, 1.0), "SRL16E": 0.0, "SRLC32E": 0.0, "CARRY4": 0.25, "MUXF7": 0.5, "MUXF8": 0.5,
    "MUXF9": 0.5, "DSP48E1": 4.0, "DSP48E2": 4.0,
}  # fmt: skip
_LAST_PARTS = {"RAM32M": "D", "RAM64M": "D", "RAM32M16": "H", "RAM64M8": "H"}
"""The last part of each RAM of LUTs."""


@dataclass(frozen=True)
class UnitResources:
    """Cells of one unit; logic_depth in LUT levels; `path`, its longest one from register to register."""

    lut: int
    ff: int
    dsp: int
    bram36: float
    logic_depth: float
    path: tuple[str, ...]


def _convert(component: Any, box: type[wiring.Component] | None) -> str:
    """RTLIL of a component as `top`; components of type `box` in it have ports alone: none of them is elaborated."""
    if box is None:
        return str(rtlil.convert(component, name="top"))
    wires: dict[str, str] = {}

    def elaborate(self: Any, platform: object) -> Module:
        m, ports = Module(), []
        for number, (path, member, value) in enumerate(self.signature.flatten(self)):
            direction, name = ("input" if member.flow is In else "output"), "__".join(map(str, path))
            ports.append((direction[0], name, Value.cast(value)))
            wires[name] = f"wire width {len(Value.cast(value))} {direction} {number} \\{name}"
        m.submodules.box = Instance(box.__name__, *ports)
        for inside in vars(self).values():
            if isinstance(inside, Elaboratable):
                inside._MustUse__used = True  # or Amaranth warns of what its constructor made
        return m

    with patch.object(box, "elaborate", elaborate):
        text = rtlil.convert(component, name="top")
    return "\n".join([text, "attribute \\blackbox 1", f"module \\{box.__name__}", *wires.values(), "end", ""])


def _synthesise(text: str, family: str) -> dict[str, Any]:
    """Netlist (Yosys JSON) of the top module `top` of an RTLIL text; Yosys runs in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        source, netlist, log = (Path(folder) / name for name in ("top.il", "top.json", "log"))
        source.write_text(text)
        passes = [f"read_rtlil {source}", f"scratchpad -set synth_xilinx.abc9.W {_WIRE_PS}",
                  f"synth_xilinx -flatten -noiopad -family {family} -top top",
                  f"write_json {netlist}"]  # fmt: skip
        script = f"from pyosys import libyosys as y; d = y.Design()\nfor p in {passes!r}: y.run_pass(p, d)"
        with log.open("w") as sink:
            done = subprocess.run([sys.executable, "-c", script], stdout=sink, stderr=subprocess.STDOUT, check=False)
        if done.returncode or not netlist.exists():
            raise RuntimeError(f"yosys failed:\n{log.read_text()[-2000:]}")
        module: dict[str, Any] = json.loads(netlist.read_text())["modules"]["top"]
        return module


def _is_register(cell: dict[str, Any]) -> bool:
    if cell["type"].startswith("DSP48"):
        return _has(cell, "MREG") or _has(cell, "PREG")
    return cell["type"] not in _LEVELS or _LEVELS[cell["type"]] == 0.0


def _has(cell: dict[str, Any], register: str) -> bool:
    """Whether a DSP slice has this one of its registers."""
    return int(str(cell["parameters"].get(register, "0")), 2) != 0


def _is_clocked(cell: dict[str, Any], port: str) -> bool:
    """Whether an input acts only at a clock edge: the write port of LUT RAM; an operand's register of a DSP slice.

    The last part's address of a RAM of LUTs is the write address, and reads as well where that part's output is
    connected (AMD UG953; of UltraScale, UG974).
    """
    if cell["type"].startswith("DSP48"):
        return port.startswith(("CE", "RST", "CLK")) or (port in ("A", "B", "C", "D") and _has(cell, f"{port}REG"))
    if (last := _LAST_PARTS.get(cell["type"])) and port == f"ADDR{last}":
        return not cell["connections"].get(f"DO{last}")
    return cell["type"].startswith("RAM") and (port == "D" or port.startswith(("DI", "WE", "WCLK")))


def _longest_path(cells: dict[str, dict[str, Any]]) -> tuple[float, list[str]]:
    """Levels and cells of the longest path between registers. Raises RuntimeError for a combinational loop."""
    driver: dict[int, str] = {}
    level: dict[str, float] = {}
    slowest: dict[str, str] = {}
    inputs: dict[str, list[int]] = {}
    for name, cell in cells.items():
        for port, bits in cell["connections"].items():
            wires = [bit for bit in bits if isinstance(bit, int)]
            if cell["port_directions"][port] == "output" and not _is_register(cell):
                driver.update(dict.fromkeys(wires, name))
            elif cell["port_directions"][port] == "input" and not _is_clocked(cell, port):
                inputs.setdefault(name, []).extend(wires)
    for name in driver.values():
        stack = [name]
        while stack:
            top = stack[-1]
            before = {driver[wire] for wire in inputs.get(top, ()) if wire in driver}
            if missing := [cell for cell in before if cell not in level and cell != top]:
                if len(stack) > len(cells):
                    raise RuntimeError("logic_depth must be finite, not a combinational loop")
                stack.extend(missing)
                continue
            level[top] = _LEVELS[cells[top]["type"]]
            if before := before - {top}:
                slowest[top] = max(sorted(before), key=lambda cell: level[cell])
                level[top] += level[slowest[top]]
            stack.pop()
    if not level:
        return 0.0, []
    # A path may also end at a register's or a DSP block's input: its length is that of the last driver.
    path = [max(level, key=lambda cell: level[cell])]
    while path[-1] in slowest:
        path.append(slowest[path[-1]])
    return level[path[0]], path[::-1]


def _names(module: dict[str, Any], path: list[str]) -> tuple[str, ...]:
    """Type of each cell, and the shortest name that the design gives a signal that it drives; both ends' first."""
    cells: dict[str, dict[str, Any]] = module["cells"]
    signals: dict[int, str] = {}
    for name, net in sorted(module["netnames"].items(), key=lambda item: (-len(item[0]), item[0])):
        if not net["hide_name"]:
            signals.update(dict.fromkeys((bit for bit in net["bits"] if isinstance(bit, int)), name))

    def describe(name: str) -> str:
        driven = {signals[bit] for bit in _bits(cells[name], "output") if bit in signals}
        return " ".join([cells[name]["type"], *sorted(driven, key=lambda name: (len(name), name))[:1]])

    if not path:
        return ()
    first, last = _bits(cells[path[0]], "input", clocked=False), _bits(cells[path[-1]], "output")
    ends = [name for name, cell in cells.items() if _is_register(cell) or cell["type"].startswith("RAM")]
    before = sorted(describe(name) for name in ends if first & _bits(cells[name], "output"))
    behind = sorted(describe(name) for name in ends if last & _bits(cells[name], "input"))
    return (*(f"from {name}" for name in before[:1]), *map(describe, path), *(f"to {name}" for name in behind[:1]))


def _bits(cell: dict[str, Any], direction: str, *, clocked: bool = True) -> set[int]:
    """Nets of a cell's ports of one direction; without `clocked`, not of those that act only at a clock edge."""
    ports = [port for port in cell["connections"] if cell["port_directions"][port] == direction]
    return {bit for port in ports if clocked or not _is_clocked(cell, port) for bit in cell["connections"][port]
            if isinstance(bit, int)}  # fmt: skip


def resources(component: Any, family: str, box: type[wiring.Component] | None = None) -> UnitResources:
    """Synthesise one Amaranth component, without its submodules of type `box`. Raises ConfigError for a family."""
    if family not in FAMILIES:
        raise ConfigError(f"family must be one of {', '.join(FAMILIES)}, not {family!r}")
    module = _synthesise(_convert(component, box), family)
    cells = module["cells"]
    levels, path = _longest_path(cells)
    count = Counter(cell["type"] for cell in cells.values())
    return UnitResources(
        lut=sum(_LUTS_PER_CELL.get(kind, 0) * n for kind, n in count.items()),
        ff=sum(n for kind, n in count.items() if kind.startswith("FD")),
        dsp=sum(n for kind, n in count.items() if kind.startswith("DSP48")),
        bram36=sum(n * (0.5 if "RAMB18" in kind else 1.0) for kind, n in count.items() if kind.startswith("RAMB")),
        logic_depth=levels,
        path=_names(module, path),
    )


@dataclass(frozen=True)
class _Kernel:
    """Parts of a kernel to synthesise: how its units are made, the last one `total`, and which it has often."""

    units: dict[str, Callable[[], Any]]
    part: str
    box: type[wiring.Component]
    """Type of `part`."""
    count: int


def _with_parts(rest: UnitResources, part: UnitResources, count: int) -> UnitResources:
    """A kernel from its `rest` and one of its `count` equal parts."""
    slowest = max(rest, part, key=lambda one: one.logic_depth)
    return UnitResources(
        **{name: getattr(rest, name) + count * getattr(part, name) for name in ("lut", "ff", "dsp", "bram36")},
        logic_depth=slowest.logic_depth,
        path=slowest.path,
    )


def _update(build: UpdateConfig) -> _Kernel:
    from nearflash.gateware.fp.add import Add
    from nearflash.gateware.fp.div import Div
    from nearflash.gateware.fp.mul import Mul
    from nearflash.gateware.fp.muladd import MulAdd
    from nearflash.gateware.fp.sqrt import Sqrt
    from nearflash.gateware.gradients.topk import TopKExpander
    from nearflash.gateware.top.update import UpdateKernel
    from nearflash.gateware.update.fetch import Fetch
    from nearflash.gateware.update.lane import Lane
    from nearflash.gateware.update.store import Store

    units: dict[str, Callable[[], Any]] = {
        "add": Add, "mul": Mul, "muladd": MulAdd, "muladd_51": partial(MulAdd, FACTOR_BITS), "div": Div, "sqrt": Sqrt,
        "lane": Lane, **({"topk_expander": partial(TopKExpander, build.lanes)} if "topk" in build.gradients else {}),
        "fetch": partial(Fetch, build), "store": partial(Store, build), "total": partial(UpdateKernel, build),
    }  # fmt: skip
    return _Kernel(units, "lane", Lane, build.lanes)


def _attend(build: AttendConfig) -> _Kernel:
    from nearflash.gateware.attention.control.channel import Channel
    from nearflash.gateware.attention.control.contexts import ContextTable
    from nearflash.gateware.attention.control.finish import Finish
    from nearflash.gateware.attention.control.nand_requests import TAG
    from nearflash.gateware.attention.control.prepare import Prepare
    from nearflash.gateware.attention.control.scan import ScanWalker
    from nearflash.gateware.attention.control.tokens import TokenWalker
    from nearflash.gateware.attention.engine.engine import ChannelEngine
    from nearflash.gateware.attention.numerics.exp2 import Exp2
    from nearflash.gateware.attention.numerics.mac import ExactMac
    from nearflash.gateware.attention.select.select import RadixSelector
    from nearflash.gateware.attention.select.selection import Selection
    from nearflash.gateware.nand.bch.share import CorrectorShare
    from nearflash.gateware.nand.checker import CodewordChecker
    from nearflash.gateware.nand.controller import NandController
    from nearflash.gateware.nand.pages.mover import PageMover
    from nearflash.gateware.nand.pages.transfer import PageTransfer
    from nearflash.gateware.top.attend import AttendKernel

    nand: dict[str, Callable[[], Any]] = {
        "nand_controller": partial(NandController, build.luns, build.nand, build.clock_hz, tag=TAG),
        "codeword_checker": CodewordChecker, "corrector": partial(CorrectorShare, min(4, build.channels)),
        "page_transfer": PageTransfer, "page_mover": partial(PageMover, build.inner),
    } if build.luns else {}  # fmt: skip
    units: dict[str, Callable[[], Any]] = {
        "exact_mac": ExactMac, "exp2": Exp2, "argtopk": partial(RadixSelector, build.selector_keys), **nand,
        **{name: partial(unit, build.inner) for name, unit in (
            ("selection", Selection), ("prepare", Prepare), ("scan_walker", ScanWalker), ("token_walker", TokenWalker),
            ("context_table", ContextTable), ("finish", Finish), ("channel_engine", ChannelEngine),
            ("channel", Channel),
        )},
        "total": partial(AttendKernel, build),
    }  # fmt: skip
    return _Kernel(units, "channel", Channel, build.channels)


def _expand(build: ExpandConfig) -> _Kernel:
    from nearflash.gateware.gradients.topk import TopKExpander
    from nearflash.gateware.top.expand import ExpandKernel
    from nearflash.gateware.weights.bitmap import BitmapExpander
    from nearflash.gateware.weights.coded import CodedValues
    from nearflash.gateware.weights.dequantize import Dequantizer
    from nearflash.gateware.weights.levels import LevelValues
    from nearflash.gateware.weights.parser import MatrixParser

    shapes = ((8, 16), (16, 16), (32, 16), (16, 8), (32, 8))
    bitmaps = {f"bitmap_{width}x{bits}": partial(BitmapExpander, width, bits) for width, bits in shapes}
    coded = {f"coded_values_{width}": partial(CodedValues, width) for width in (8, 16)}
    levels = {f"level_values_{width}": partial(LevelValues, width) for width in (4, 8, 16) if build.levels}
    scaled = {f"dequantizer_{width}": partial(Dequantizer, width) for width in (8, 16)}
    units: dict[str, Callable[[], Any]] = {
        **bitmaps, **coded, **levels, **scaled, "topk_expander": partial(TopKExpander, 4),
        "matrix_parser": partial(MatrixParser, build.port_bits, build.columns_max, build.levels),
        "total": partial(ExpandKernel, build),
    }  # fmt: skip
    return _Kernel(units, "matrix_parser", MatrixParser, 1)


def _units(build: KernelConfig) -> _Kernel:
    if isinstance(build, ExpandConfig):
        return _expand(build)
    if isinstance(build, AttendConfig):
        return _attend(build)
    assert isinstance(build, UpdateConfig)
    return _update(build)


def kernel_resources(build: KernelConfig, family: str) -> UnitResources:
    """Resources of a whole kernel: of its equal parts once, of the rest, added up. Raises ConfigError as `run`."""
    made = _units(build)
    part = resources(made.units[made.part](), family)
    return _with_parts(resources(made.units["total"](), family, made.box), part, made.count)


def run(kernel: str, family: str, config_name: str) -> Iterator[dict[str, Any]]:
    """One row a unit, the whole kernel (`unit` "total") last. Raises ConfigError for names that do not exist.

    Of expand, the expanders come in several widths, whatever the build has.
    """
    build = config_of(kernel, config_name)
    if family not in FAMILIES:
        raise ConfigError(f"family must be one of {', '.join(FAMILIES)}, not {family!r}")
    made = _units(build)
    rows = {}
    for unit, make in made.units.items():
        cells = rows[unit] = resources(make(), family, made.box if unit == "total" else None)
        if unit == "total":
            cells = _with_parts(cells, rows[made.part], made.count)
        yield _row(build, family, unit, cells)


def _row(build: KernelConfig, family: str, unit: str, found: UnitResources) -> dict[str, Any]:
    prefix = "" if unit == "total" else "unit_"
    cells = {f"{prefix}{name}": getattr(found, name) for name in ("lut", "ff", "dsp", "bram36")}
    return {"bench": "synth", "config": build.full_name, "digest": build.digest, "family": family, "unit": unit,
            **cells, "logic_depth": found.logic_depth, "path": " > ".join(found.path)}  # fmt: skip


def command(subparsers: Any) -> None:
    """Register `nearflash synth`."""
    parser: argparse.ArgumentParser = subparsers.add_parser("synth", epilog=_EXAMPLES)
    parser.add_argument("kernel", help="Kernel: update, attend or expand.")
    parser.add_argument("--family", default="xcup", help=f"Family of FPGAs: {', '.join(FAMILIES)}.")
    parser.add_argument("--config", default="smartssd", help="Build configuration of the kernel.")
    parser.add_argument("--json", action="store_true", help="Write one JSON object a line to standard output.")
    parser.set_defaults(rows=lambda options: run(options.kernel, options.family, options.config))
