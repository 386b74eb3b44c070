"""Place and route with nextpnr, and what its report states: highest clock, critical path, sites used."""

import json
import re
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearflash.abi.errors import FormatError
from nearflash.boards.open.nextpnr.chip_database import correct
from nearflash.boards.open.nextpnr.slice_timing import SliceDelays
from nearflash.boards.open.nextpnr.timing import BlockDelays, block_of
from nearflash.boards.open.packages import SidPrograms
from nearflash.device.bitstreams.board import Routing

__all__ = ["SETTINGS", "Routed", "constraints", "count_unresolvable", "parse_report", "route"]

#: Options that give the same result for the same netlist and the same nextpnr. The alternate weights make a wire that
#: several nets want dear from the first iteration on: with the usual ones the nets of a full column never settle. With
#: several threads the placer makes its table of sines and cosines in two of them at once, and now and then a wrong one.
_OPTIONS = (
    "--threads", "1", "--placer", "static", "--router", "router2", "--router2-alt-weights", "--timing-allow-fail"
)  # fmt: skip
SETTINGS = {"router2/estimateWeight": "0.6", "router2/histCongWeight": "1.5"}
"""What has no option, in the netlist. nextpnr takes twice the delay that is ahead (0.8 ns and 0.05 ns a tile), which a
search then follows blindly; and a wire that stays overused becomes dearer by more in each iteration than by itself."""
#: Reroutes connections that are later than the clock allows.
_REROUTE_LATE = "--tmg-ripup"
_OWN_TYPES = """own = {own}
for name, cell in ctx.cells:
    if cell.type in own:
        cell.type = own[cell.type]
"""
"""Gives cells their blocks' own types again, which nextpnr packs, after it took each one's delays by the netlist's."""
_ITERATION = re.compile(r"iter=\d+ wires=\d+ overused=(\d+) overuse=\d+ tmgfail=(\d+)")
_REPEATS = 50
"""Iterations, of which the latter half had no fewer overused wires and no fewer late connections than the first."""


@dataclass(frozen=True)
class Routed:
    """A routed design: `critical_path` has delay, kind and net or cell of each step from register to register."""

    fmax_hz: int
    critical_path: tuple[str, ...]
    sites: Mapping[str, int]
    """Used sites by kind."""


def constraints(pins: Mapping[str, str], standard: str = "LVCMOS33") -> str:
    """XDC text that places top-level ports on package pins."""
    return "".join(
        f"set_property PACKAGE_PIN {pin} [get_ports {port}]\nset_property IOSTANDARD {standard} [get_ports {port}]\n"
        for port, pin in pins.items()
    )


def route(
    programs: SidPrograms,
    part: str,
    device: str,
    netlist: Path,
    xdc: Path,
    delays: Mapping[str, BlockDelays],
    pins: Collection[str],
    routing: Routing,
    slices: SliceDelays | None = None,
) -> tuple[Routed, Path]:
    """Place and route a netlist; returns the report and the FASM file, beside the netlist and the `.routed.json`.

    delays: of the hard blocks that nextpnr knows none of, by their types in the netlist. pins: of the processor block,
    in use. routing: where it starts from. slices: delays of slices in place of nextpnr's stubs.
    Warns where nextpnr's chip database is of a version that cannot be corrected, and routes with it as it is; and
    where connections stay later than the clock allows: then it routes once more, without rerouting them.
    Raises ToolsError where nextpnr fails.
    """
    suffixes = (".fasm", ".report.json", ".nextpnr.log", ".chipdb.bin", ".own_types.py")
    fasm, report, log, database, own_types = (netlist.with_suffix(suffix) for suffix in suffixes)
    own_types.write_text(_OWN_TYPES.format(own={name: block_of(name) for name in delays}))
    try:
        correct(programs.chip_database(device), database, delays, pins, slices)
    except FormatError as error:
        database = programs.chip_database(device)
        warnings.warn(
            "nets of the processor block take seconds each to route, and Fmax leaves out DSP slices and the processor "
            f"block: {error}",
            stacklevel=2,
        )
    arguments: list[str | Path] = [
        "--device", part, "--chipdb", database, "--json", netlist, "--vopt", f"xdc={xdc}", "--vopt", f"fasm={fasm}",
        "--report", report, "--write", netlist.with_suffix(".routed.json"), "--freq", f"{routing.freq_hz / 1e6:g}",
        "--seed", str(routing.seed), "--pre-pack", own_types, *_OPTIONS,
    ]  # fmt: skip
    program = "nextpnr-himbaechel-xilinx"
    if late := count_unresolvable(programs.run(program, *arguments, _REROUTE_LATE, log=log, stop=count_unresolvable)):
        warnings.warn(
            f"{late} connections stay later than {routing.freq_hz / 1e6:g} MHz allow: a lower freq_hz or another "
            "seed in board.toml may help",
            stacklevel=2,
        )
        programs.run(program, *arguments, log=log)
    return parse_report(json.loads(report.read_text())), fasm


def count_unresolvable(log: str) -> int:
    """Connections that nextpnr reroutes again and again without an end, by its log; 0: it gets on, or has ended."""
    counts = [(int(overused), int(late)) for overused, late in _ITERATION.findall(log)[-_REPEATS:]]
    if len(counts) < _REPEATS or not all(late for _, late in counts):
        return 0
    half = _REPEATS // 2
    stuck = all(min(each[half:]) >= min(each[:half]) for each in zip(*counts, strict=True))
    return counts[-1][1] if stuck else 0


def parse_report(report: Mapping[str, Any]) -> Routed:
    """Read the slowest clock of nextpnr's JSON report. Raises FormatError for a report without a clock."""
    clocks = report.get("fmax", {})
    if not clocks:
        raise FormatError("report must have the fmax of a clock, not none: the design has no registers")
    clock = min(clocks, key=lambda name: float(clocks[name]["achieved"]))
    paths = [path for path in report.get("critical_paths", ()) if path["from"] == path["to"] == f"posedge {clock}"]
    steps = tuple(_step(step) for path in paths[:1] for step in path["path"])
    sites = {kind: counts["used"] for kind, counts in report.get("utilization", {}).items() if counts["used"]}
    return Routed(int(float(clocks[clock]["achieved"]) * 1e6), steps, sites)


def _step(step: Mapping[str, Any]) -> str:
    """One step of a path: `0.62 ns routing kernel.lane.sum`."""
    name = step.get("net") or step["to"]["cell"]
    return f"{step['delay']:.2f} ns {step['type']} {name}"
