"""From RTLIL to a netlist of Xilinx cells: yosys, in a process of its own."""

import importlib.metadata
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nearflash.abi.errors import FormatError
from nearflash.boards.open.packages import run_logged
from nearflash.device.bitstreams.board import Resources

__all__ = ["DSP_ADDER", "count_cells", "join_memories", "synthesise", "tap_shift_registers", "tie_processor",
           "yosys_version"]  # fmt: skip

_SCRIPT = """import sys
from pyosys import libyosys
design = libyosys.Design()
for line in sys.argv[1:]:
    libyosys.run_pass(line, design)
"""
DSP_ADDER = Path(__file__).with_name("dsp_adder.v")
"""A techmap of wide sums and differences to DSP slices."""
_WIRE_PS = 700
"""Delay of a wire that mapping reckons with: what nextpnr's router reaches on a Zynq-7020 (yosys by itself: 300)."""
_LUTS = {
    **{f"LUT{inputs}": 1 for inputs in range(1, 7)}, "INV": 1, "SRL16E": 1, "SRLC32E": 1, "RAM32X1D": 2, "RAM64X1D": 2,
    "RAM64X1S": 1, "RAM32M": 4, "RAM64M": 4, "RAM128X1D": 4, "RAM256X1D": 8,
}  # fmt: skip
"""LUTs that each primitive takes."""


def yosys_version() -> str:
    """Version of the installed yosys."""
    return importlib.metadata.version("pyosys")


def synthesise(source: Path, family: str, settings: Mapping[str, str], dsp_adder_bits: int = 0) -> dict[str, Any]:
    """Map the module `top` of an RTLIL file to the cells of a family: the netlist, as yosys' JSON has it.

    settings: of nextpnr, for this netlist.
    dsp_adder_bits: sums and differences of so many bits (to 48) become DSP slices in place of carry chains; 0: none.

    What yosys itself makes stays beside the file. Raises ToolsError where yosys fails.
    """
    netlist = source.with_suffix(".yosys.json")
    step = f"synth_xilinx -flatten -abc9 -family {family} -top top -run"
    adders = [f"techmap -map {DSP_ADDER} -D DSP_ADDER_BITS={dsp_adder_bits}", "opt_expr -fine", "opt_clean"]
    passes = [
        f"read_rtlil {source}",
        f"scratchpad -set synth_xilinx.abc9.W {_WIRE_PS}",
        f"{step} begin:coarse",  # multipliers are in DSP slices
        *(adders if dsp_adder_bits else []),
        f"{step} coarse:",
        "check -assert",
        f"write_json {netlist}",
    ]
    run_logged([sys.executable, "-c", _SCRIPT, *passes], netlist.with_suffix(".log"))
    design: dict[str, Any] = json.loads(netlist.read_text())
    top = design["modules"]["top"]
    top["settings"] = dict(settings)
    tap_shift_registers(top["cells"])
    join_memories(top["cells"])
    tie_processor(top["cells"])
    return design


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


def join_memories(cells: dict[str, Any]) -> None:
    """Make a RAM64M of up to four RAM64X1S with one address: nextpnr cannot pack those alone.

    Raises FormatError for a memory of LUTs that does not begin with zeros: nextpnr does not take over its contents.
    """
    alike = defaultdict(list)
    for name, cell in cells.items():
        if cell["type"] == "RAM64X1S":
            pins = cell["connections"]
            inverted = cell.get("parameters", {}).get("IS_WCLK_INVERTED")
            alike[(*_address(cell), *pins["WE"], *pins["WCLK"], inverted)].append(name)
    for names in alike.values():
        for at in range(0, len(names), 4):
            own = {letter: cells.pop(name) for letter, name in zip("ABCD", names[at : at + 4], strict=False)}
            cells[names[at]] = _join(own)
    for name, cell in cells.items():
        contents = [value for key, value in cell.get("parameters", {}).items() if key.startswith("INIT_")]
        if cell["type"] in ("RAM32M", "RAM64M") and any("1" in value for value in contents):
            raise FormatError(f"memory {name} must begin with zeros: the open flow cannot give it other contents")


def _address(memory: dict[str, Any]) -> list[Any]:
    """The nets of a RAM64X1S's address, lowest bit first."""
    return [bit for place in range(6) for bit in memory["connections"][f"A{place}"]]


def _join(memories: dict[str, Any]) -> dict[str, Any]:
    """A RAM64M of single-port memories by the letter of its part."""
    first = memories["A"]
    pins = {pin: first["connections"][pin] for pin in ("WCLK", "WE")}
    address = _address(first)
    parameters = {name: value for name, value in first.get("parameters", {}).items() if name != "INIT"}
    pins |= {f"ADDR{letter}": address for letter in "ABCD"}
    directions = dict.fromkeys(pins, "input")
    for letter, memory in memories.items():
        pins |= {f"DI{letter}": memory["connections"]["D"], f"DO{letter}": memory["connections"]["O"]}
        directions |= {f"DI{letter}": "input", f"DO{letter}": "output"}
        if "INIT" in memory.get("parameters", {}):
            parameters[f"INIT_{letter}"] = memory["parameters"]["INIT"]
    return {**first, "type": "RAM64M", "parameters": parameters, "port_directions": directions, "connections": pins}


def tie_processor(cells: dict[str, Any]) -> None:
    """Tie the processor block's DDRARB low where the design leaves it open, as nextpnr does with all its other inputs.

    Open, these four read 1: an urgent request of each memory port of the DDR controller.
    """
    for cell in cells.values():
        if cell["type"] == "PS7" and "DDRARB" not in cell["connections"]:
            cell["connections"]["DDRARB"] = ["0"] * 4
            cell["port_directions"]["DDRARB"] = "input"


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
