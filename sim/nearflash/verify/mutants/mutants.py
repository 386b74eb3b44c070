"""Mutants of a component: small changes at the cells of its netlist, all in one design and selected by an input.

Yosys' `mutate` inverts a bit of a cell's port, ties it to a constant, or inverts it where another one is set.
"""

import hashlib
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearflash.sim.verilog import TOP, Design, Port, YosysError, convert
from nearflash.verify.mutants.yosys import yosys

__all__ = ["MUTANT", "Mutants", "MutatedDesign", "make_mutants"]

#: The input that selects a mutant; 0 is the original.
MUTANT = "mutant"
_FLATTEN = [
    "read_rtlil top.il",
    f"hierarchy -top {TOP}",
    "proc -norom",
    "flatten",
    "opt_expr",
    "opt_merge",
    "opt_clean",
]
_CLOCK = re.compile(r" -port \S*CLK ")
_UNCLOCKED_READ = re.compile(r"^  cell \$memrd_v2 (\S+)\n(?:    .*\n)*?    parameter \\CLK_ENABLE 0", re.MULTILINE)
_CONSTANT = re.compile(r" -cell (\S+) -port (?:EN|ARST|SRST) ")
"""Of such a read, Yosys wants these as they are."""
_CELLS = "t:$meminit* %n"  # a memory's first contents stay constants
_ALL = 1 << 30  # drawing among them is ours: that of `mutate` may not end for a small design


@dataclass(frozen=True)
class MutatedDesign(Design):
    """A design that comes as Verilog, with the input MUTANT; LATENCY is that of the original (0: it has streams)."""

    verilog: str
    LATENCY: int

    def write_verilog(self, folder: Path) -> Path:
        """Write `folder/top.v`."""
        (folder / "top.v").write_text(self.verilog)
        return folder / "top.v"


@dataclass(frozen=True)
class Mutants:
    """`design` holds all mutants; `commands[k]` is Yosys' command that makes mutant k + 1 of `original` (RTLIL)."""

    design: MutatedDesign
    original: str
    commands: tuple[str, ...]


def make_mutants(component: Any, count: int, seed: int, folder: Path, *, part: str = "") -> Mutants:
    """`count` mutants of `component` (fewer where it has not so many), the same ones for the same seed.

    part: name of the submodule in which the mutants are; by default everywhere.

    Raises YosysError where Yosys fails.
    """
    design = convert(component)
    (folder / "top.il").write_text(design.read_rtlil())
    listing = f"mutate -list {_ALL} -seed {seed} -o candidates.txt {_CELLS}"
    if not yosys(folder, [*_FLATTEN, "write_rtlil flat.il", listing]):
        raise YosysError(f"yosys must accept the design:\n{(folder / 'yosys.log').read_text()[-2000:]}")
    flat = (folder / "flat.il").read_text()
    candidates = _candidates((folder / "candidates.txt").read_text(), flat, part)
    commands = random.Random(seed).sample(candidates, min(count, len(candidates)))
    bits = len(commands).bit_length()
    selected = [f"{command} -ctrl {MUTANT} {bits} {k + 1}" for k, command in enumerate(commands)]
    if not yosys(folder, ["read_rtlil flat.il", *selected, "write_verilog -norename -noattr mutants.v"]):
        raise YosysError(f"yosys must make the mutants:\n{(folder / 'yosys.log').read_text()[-2000:]}")
    verilog = (folder / "mutants.v").read_text()
    mutated = MutatedDesign(
        hashlib.sha256(verilog.encode()).hexdigest(),
        lambda: "",
        (*design.ports, Port(MUTANT, bits, False, True)),
        (),
        (),
        verilog,
        getattr(component, "LATENCY", 0),
    )
    return Mutants(mutated, flat, tuple(commands))


def _candidates(listing: str, flat: str, part: str) -> list[str]:
    """The commands of a listing that are in `part`, but for those at clocks and at what Yosys wants constant."""
    reads, inside = set(_UNCLOCKED_READ.findall(flat)), f"\\{part}." if part else ""
    lines = [line.strip() for line in listing.splitlines() if inside in line and not _CLOCK.search(line)]
    return [line for line in lines if line and not ((constant := _CONSTANT.search(line)) and constant[1] in reads)]
