"""From RTLIL to a netlist of Xilinx cells: yosys, in a process of its own."""

import importlib.metadata
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from nearflash.abi.errors import FormatError
from nearflash.boards.open.packages import run_logged
from nearflash.device.bitstreams.board import Resources

__all__ = ["count_cells", "synthesise", "tap_shift_registers", "yosys_version"]

_SCRIPT = """import sys
from pyosys import libyosys
design = libyosys.Design()
for line in sys.argv[1:]:
    libyosys.run_pass(line, design)
"""
_LUTS = {
    **{f"LUT{inputs}": 1 for inputs in range(1, 7)}, "INV": 1, "SRL16E": 1, "SRLC32E": 1, "RAM32X1D": 2, "RAM64X1D": 2,
    "RAM64X1S": 1, "RAM32M": 4, "RAM64M": 4, "RAM128X1D": 4, "RAM256X1D": 8,
}  # fmt: skip
"""LUTs that each primitive takes."""


def yosys_version() -> str:
    """Version of the installed yosys."""
    return importlib.metadata.version("pyosys")


def synthesise(source: Path, family: str, netlist: Path) -> Resources:
    """Map the module `top` of an RTLIL file to the cells of a family; write the netlist as JSON.

    Returns the cells that it has. Raises ToolsError where yosys fails.
    """
    passes = [
        f"read_rtlil {source}",
        f"synth_xilinx -flatten -abc9 -family {family} -top top",
        "check -assert",
        f"write_json {netlist}",
    ]
    run_logged([sys.executable, "-c", _SCRIPT, *passes], netlist.with_suffix(".yosys.log"))
    design = json.loads(netlist.read_text())
    cells = design["modules"]["top"]["cells"]
    tap_shift_registers(cells)
    netlist.write_text(json.dumps(design))
    return count_cells(cells)


def tap_shift_registers(cells: dict[str, Any]) -> None:
    """Take the last bit of each 32-bit shift register from Q at address 31: nextpnr does not know its port Q31.

    Raises FormatError for one whose Q and Q31 are both used.
    """
    used = {bit for cell in cells.values() for port, bits in cell["connections"].items()
            if cell["port_directions"][port] == "input" for bit in bits}  # fmt: skip
    for name, cell in cells.items():
        pins = cell["connections"]
        if cell["type"] != "SRLC32E" or "Q31" not in pins:
            continue
        last = pins.pop("Q31")
        del cell["port_directions"]["Q31"]
        if used.isdisjoint(last):
            continue
        if not used.isdisjoint(pins.get("Q", ())):
            raise FormatError(f"shift register {name} must have one output, not Q and Q31")
        pins |= {"Q": last, "A": ["1"] * 5}
        cell["port_directions"]["Q"] = "output"


def count_cells(cells: dict[str, Any]) -> Resources:
    """LUTs, flip-flops, DSP slices and block RAMs of a netlist's cells."""
    count = Counter(cell["type"] for cell in cells.values())
    return Resources(
        lut=sum(_LUTS.get(kind, 0) * number for kind, number in count.items()),
        ff=sum(number for kind, number in count.items() if kind.startswith("FD")),
        dsp=sum(number for kind, number in count.items() if kind.startswith("DSP48")),
        bram36=sum(number * (0.5 if kind.startswith("RAMB18") else 1.0) for kind, number in count.items()
                   if kind.startswith("RAMB")),
    )  # fmt: skip
