"""`nearflash bitstream lint`: Verilator's warnings on the Verilog that vendor tools get, Yosys' checks on its source.

Verilator runs with -Wall; WAIVERS has every kind of warning that is let through, and why. Yosys takes the RTLIL that
the Verilog is written from (it would read the Verilog of a kernel with NAND for a quarter of an hour), flattens it and
checks for undriven wires, several drivers and combinational loops; nothing of that is let through.
"""

import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nearflash.abi.kernel.config import CONFIGS, config
from nearflash.boards.vendor.absent_nand import AbsentNand
from nearflash.boards.vendor.kernel import FlatDesign, convert_kernel, flatten
from nearflash.sim.verilator.build import verilator_root

__all__ = ["WAIVERS", "LintReport", "Waiver", "lint", "lint_configs"]


@dataclass(frozen=True)
class Waiver:
    """Warnings of one rule whose text matches, and why they are no fault."""

    rule: str
    text: str
    """Regular expression that the beginning of the warning's text matches."""
    reason: str


WAIVERS = (
    Waiver("DECLFILENAME", "Filename '", "one file holds all modules of a kernel"),
    Waiver("SYMRSVDWORD", r"Symbol matches C\+\+ common word: 'interrupt'", "XRT names the port so"),
    Waiver("PROCASSINIT", "Procedural assignment to declaration with initial value",
           "registers have an initial value, which the bitstream loads, beside their reset"),
    Waiver("VARHIDDEN", "Declaration of signal hides", "signals and instances of different modules have one name"),
    Waiver("UNUSEDSIGNAL", "(Signal is|Bits of signal are) not (driven, nor )?used",
           "members of standard interfaces and records that a module does not read"),
    Waiver("WIDTHEXPAND", "Operator", "operands are extended as Amaranth means them"),
    Waiver("WIDTHTRUNC", "(Operator|Logical operator)",
           "an assignment keeps the low bits and a logical operator any bit, as Amaranth means them"),
    Waiver("CASEOVERLAP", "Case conditions overlap", "a multiplexer with one-hot selects, written as casez"),
    Waiver("UNSIGNED", "Comparison is constant due to unsigned arithmetic", "a bound that is zero in this build"),
    Waiver("CMPCONST", "Comparison is constant due to limited range", "a width that the configuration fixes"),
)  # fmt: skip
"""All that is let through."""

_WARNING = re.compile(r"^%(?:Warning|Error)-(\w+): [^ ]*?:(\d+):\d+: (.*)$", re.MULTILINE)
_OTHER = re.compile(r"^%Error(?:-\w+)?: (?!Exiting due to)(.*)$", re.MULTILINE)


@dataclass(frozen=True)
class LintReport:
    """Findings in one design: waived warnings by rule, and complaints that nothing waives."""

    name: str
    waived: Counter[str]
    complaints: tuple[str, ...]


def lint(design: FlatDesign, name: str) -> LintReport:
    """Check a design with both tools."""
    with tempfile.TemporaryDirectory() as folder:
        verilog, rtlil = (Path(folder) / f"{design.top}{suffix}" for suffix in (".v", ".il"))
        design.write_verilog(verilog)
        rtlil.write_text(design.rtlil)
        waived, complaints = verilator_warnings(verilog, design.top)
        return LintReport(name, waived, (*complaints, *yosys_problems(rtlil, design.top)))


def verilator_warnings(path: Path, top: str) -> tuple[Counter[str], list[str]]:
    """Waived warnings of a Verilog file by rule, and the others."""
    program = verilator_root() / "bin" / "verilator_bin"
    command = [str(program), "--lint-only", "-Wall", "-Wno-fatal", "--top-module", top, str(path)]
    environment = {"VERILATOR_ROOT": str(verilator_root())}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    waived: Counter[str] = Counter()
    complaints = []
    for rule, line, text in _WARNING.findall(done.stderr):
        if any(waiver.rule == rule and re.match(waiver.text, text) for waiver in WAIVERS):
            waived[rule] += 1
        else:
            complaints.append(f"{path.name}:{line}: {rule}: {text}")
    return waived, complaints + [f"{path.name}: {text}" for text in _OTHER.findall(done.stderr) if "-" not in text[:1]]


def yosys_problems(path: Path, top: str) -> list[str]:
    """List what Yosys' `check` finds in an RTLIL file, its modules flattened; it runs in a process of its own."""
    passes = [f"read_rtlil {path}", f"hierarchy -check -top {top}", "proc", "flatten", "opt_clean", "check"]
    script = f"from pyosys import libyosys as y; d = y.Design()\nfor p in {passes!r}: y.run_pass(p, d)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    report = re.search(r"^Found and reported (\d+) problems", output, re.MULTILINE)
    if done.returncode or report is None:
        return [f"{path.name}: yosys must finish its check:\n{output[-500:]}"]
    checked = output[output.rindex("Executing CHECK pass") :]
    problems = [line for line in checked.splitlines() if line.startswith("Warning:")]
    return problems or ([f"{path.name}: {report[0]}"] if int(report[1]) else [])


def lint_configs(names: list[str] | None = None) -> Iterator[LintReport]:
    """Reports of the kernels of build configurations, each as it is done; of all, and of what stands for a NAND PHY,
    without names. Raises ConfigError for an unknown name.
    """
    builds = [config(name) for name in (CONFIGS if names is None else names)]
    if names is None:
        yield lint(flatten(AbsentNand(), "nand_phy"), "nand_phy")
    for build in builds:
        yield lint(convert_kernel(build), build.full_name)
