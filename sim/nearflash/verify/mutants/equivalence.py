"""Is a mutant that no vector distinguished from the original the same circuit?

Both are compared from reset on, with memories cut out: what they give to read is the same for both and may be anything,
and what is written and where (if it is) is an output to compare, so contents that are equal stay so. ABC removes
registers and gates that correspond (scorr) and proves that what is left never differs (pdr). What it does not prove in
its time counts as not equivalent.
"""

import re
import resource
import subprocess
from pathlib import Path

from pyosys import __file__ as _pyosys

from nearflash.verify.mutants.yosys import yosys

__all__ = ["is_equivalent"]

_PROOF_S = 10
_LIMIT_S = 60
"""Of the processor's time, for a proof that does not end by itself: other work must not decide what is proven."""
_TO_GATES = ["opt_clean", "async2sync", "opt_expr", "techmap", "opt -fast", "dffunmap"]
_TO_GATES += ["setundef -zero -init", "setundef -zero", "aigmap", "write_aiger -zinit miter.aig"]
_READ_PORTS = """\
  wire width {WIDTH} input {data} {name}
  wire width {ABITS} output {address} {name}_address
  wire output {enable} {name}_enable
"""
_READ = """\
  connect {DATA} {name}
  connect {name}_address {ADDR}
  connect {name}_enable {EN}
"""
_WRITE_PORTS = """\
  wire width {WIDTH} output {data} {name}_data
  wire width {ABITS} output {address} {name}_address
  wire width {WIDTH} output {enable} {name}_enable
  wire {name}_any
"""
_WRITE = """\
  cell $and {name}_and
    parameter \\A_WIDTH {WIDTH}
    parameter \\B_WIDTH {WIDTH}
    parameter \\Y_WIDTH {WIDTH}
    parameter \\A_SIGNED 0
    parameter \\B_SIGNED 0
    connect \\A {DATA}
    connect \\B {EN}
    connect \\Y {name}_data
  end
  cell $reduce_or {name}_or
    parameter \\A_WIDTH {WIDTH}
    parameter \\Y_WIDTH 1
    parameter \\A_SIGNED 0
    connect \\A {EN}
    connect \\Y {name}_any
  end
  cell $mux {name}_mux
    parameter \\WIDTH {ABITS}
    connect \\A {ABITS}'0
    connect \\B {ADDR}
    connect \\S {name}_any
    connect \\Y {name}_address
  end
  connect {name}_enable {EN}
"""
_MEMORY_PORT = re.compile(r"^  cell \$mem(rd|wr|init)_v2 .*?^  end\n", re.MULTILINE | re.DOTALL)


def is_equivalent(original: str, command: str, folder: Path) -> bool:
    """Whether `original` (flat RTLIL of one module) and its mutant by Yosys' `command` are proven equal."""
    (folder / "gold.il").write_text(without_memories(original))
    (folder / "flat.il").write_text(original)
    if not yosys(folder, ["read_rtlil flat.il", command, "write_rtlil mutant.il"], "mutant.log"):
        return False
    (folder / "gate.il").write_text(without_memories((folder / "mutant.il").read_text()))
    both = ["read_rtlil gold.il", "rename top gold", "read_rtlil gate.il", "rename top gate"]
    miter = [
        "miter -equiv -flatten gold gate miter",
        "hierarchy -top miter",
        *_TO_GATES,
        "write_aiger -zinit miter.aig",
    ]
    if not yosys(folder, [*both, *miter], "miter.log"):
        return False
    proof = f"read_aiger miter.aig; strash; scorr; pdr -T {_PROOF_S}; sat -C 1000"
    abc = [str(Path(_pyosys).parent / "yosys-abc"), "-c", proof]
    with subprocess.Popen(abc, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        # Not in a preexec_fn: that would fork, and a fork of a process with large mappings is refused (ENOMEM).
        resource.prlimit(process.pid, resource.RLIMIT_CPU, (_LIMIT_S, _LIMIT_S))
        printed, _ = process.communicate()
    return "Property proved" in printed or "UNSATISFIABLE" in printed


def without_memories(text: str) -> str:
    """RTLIL of the module without memories: what is read becomes inputs, addresses and what is written outputs."""
    first = 1 + max((int(number) for number in re.findall(r"^  wire .*put (\d+) ", text, re.MULTILINE)), default=0)
    ports: list[str] = []

    def cut(match: re.Match[str]) -> str:
        cell, kind = match[0], match[1]
        if kind == "init":
            return ""
        found = dict(re.findall(r"(?:parameter|connect) \\(\w+) (.*)", cell))
        name, number = rf"\cut_{len(ports)}", first + 3 * len(ports)
        fields = found | {"name": name, "data": number, "address": number + 1, "enable": number + 2}
        ports.append((_READ_PORTS if kind == "rd" else _WRITE_PORTS).format_map(fields))
        return (_READ if kind == "rd" else _WRITE).format_map(fields)

    body = re.sub(r"^  memory .*\n", "", _MEMORY_PORT.sub(cut, text), flags=re.MULTILINE)
    return re.sub(r"^(module .*\n)", lambda match: match[1] + "".join(ports), body, count=1, flags=re.MULTILINE)
