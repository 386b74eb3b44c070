"""Free-running datapaths, evaluated for many cycles at once.

A unit without feedback, enables and back-pressure gives f(input) a fixed number of cycles later, whatever registers lie
on the way. So its netlist without the registers is f, and one vector register holds the same wire of several cycles:
datapath.hpp computes a block of cycles when the first of its results is due. Verilator would evaluate every stage in
every cycle, in code that no cache holds.

That is checked, not trusted: on all paths from an input to an output there must be equally many registers. Inputs that
the component names in HELD_INPUTS must not change while something is inside, and count for none.
Limits: sums, products, orders and shifts of up to 64 bits.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from nearflash.sim.verilog import DatapathModule, write_netlist

__all__ = ["DatapathError", "replace_datapaths"]

_WORD_BITS = 64
_BITWISE = {"$and": "&", "$or": "|", "$xor": "^"}
_SUMS = {"$add": "+", "$sub": "-", "$mul": "*"}
_ORDERS = {"$lt": "<", "$le": "<=", "$gt": ">", "$ge": ">="}
_SHELL = """module {module}({ports});
{declarations}  import "DPI-C" function chandle {name}_new();
  import "DPI-C" function void {name}_free(input chandle datapath);
  import "DPI-C" function bit {name}_is_due(input chandle datapath);
  import "DPI-C" function void {name}_hold(input chandle datapath, input bit [{held}:0] words);
  import "DPI-C" function void {name}_advance(
    input chandle datapath, input bit [{inputs}:0] words, output bit [{results}:0] result);
  chandle datapath;
  reg [{results}:0] result, next;
  initial datapath = {name}_new();
  final {name}_free(datapath);
  always @(posedge clk) begin
    if ({name}_is_due(datapath)) {name}_hold(datapath, {{{held_words}}});
    {name}_advance(datapath, {{{input_words}}}, next);
    result <= next;
  end
{assignments}endmodule
"""
_GLUE = """extern "C" {{
void* {name}_new() {{ return new Datapath<Net>; }}
void {name}_free(void* datapath) {{ delete static_cast<Datapath<Net>*>(datapath); }}
svBit {name}_is_due(void* datapath) {{ return static_cast<Datapath<Net>*>(datapath)->is_due(); }}
void {name}_hold(void* datapath, const svBitVecVal* words) {{ static_cast<Datapath<Net>*>(datapath)->hold(words); }}
void {name}_advance(void* datapath, const svBitVecVal* words, svBitVecVal* result) {{
    static_cast<Datapath<Net>*>(datapath)->advance(words, result);
}}
}}
"""


class DatapathError(ValueError):
    """A component with HELD_INPUTS is no free-running datapath, or has an operation that is not known here."""


def replace_datapaths(verilog: str, datapaths: Sequence[DatapathModule], work: Path) -> str:
    """The text with a call of C++ in place of each module, whose C++ goes into `work/datapath<k>.cpp`.

    `work` is the folder of Design.write_verilog. Raises DatapathError, YosysError.
    """
    for index, datapath in enumerate(datapaths):
        name = f"datapath{index}"
        (module,) = json.loads(write_netlist(work, datapath.module, name).read_text())["modules"].values()
        netlist = _Netlist(module, datapath.held)
        (work / f"{name}.cpp").write_text(netlist.cpp() + _GLUE.format(name=name))
        pattern = re.compile(rf"^module (\\{re.escape(datapath.module)} )\((.*?)\);.*?^endmodule\n", re.M | re.S)
        verilog = pattern.sub(lambda match: netlist.shell(match[1], match[2], name), verilog)  # noqa: B023
    return verilog


class _Netlist:
    """A flat module of Yosys' JSON; bits are numbers, constant ones "0", "1", "x".

    Every value becomes variables of up to 64 bits, zero above their width.
    """

    def __init__(self, module: dict[str, Any], held: Sequence[str]) -> None:
        self._ports: dict[str, dict[str, Any]] = module["ports"]
        self._held = held
        self._cells = [cell for cell in module["cells"].values() if _output(cell)]
        self._stored: dict[Any, Any] = {}  # register's output -> its input
        self._contents: dict[str, list[int]] = {}  # of memories
        self._places: dict[Any, tuple[str, int]] = {}  # bit -> variable, place in it
        self._cycles: dict[Any, int | None] = {}  # bit -> cycle in which it is there, None: always
        self._widths: dict[str, int] = {}
        self._lines: list[str] = []
        self._tables: dict[str, str] = {}  # contents -> name
        for cell in module["cells"].values():
            wires, parameters = cell["connections"], cell["parameters"]
            if cell["type"] == "$dff":
                self._stored |= dict(zip(wires["Q"], wires["D"], strict=True))
            elif cell["type"].startswith("$meminit"):
                width, bits = int(parameters["WIDTH"], 2), "".join(wires["DATA"])[::-1].replace("x", "0")
                words = [int(bits[end - width : end], 2) for end in range(len(bits), 0, -width)]
                self._contents[parameters["MEMID"]] = words

    def cpp(self) -> str:
        """C++ of struct Net (see datapath.hpp)."""
        inputs, held = (self._load(self._select("input", is_held), is_held) for is_held in (False, True))
        for cell in self._sort_cells():
            self._compute(cell)
        results, cycles = [], set()
        for name in self._select("output", None):
            words, cycle = self._value(self._ports[name]["bits"])
            results += words
            cycles.add(cycle)
        if len(cycles) > 1 or None in cycles:
            raise DatapathError(f"all outputs of a datapath must be there in the same cycle, not in {cycles}")
        return "\n".join(
            [
                '#include "datapath.hpp"',
                *(f"static const uint64_t {name}[] = {{{contents}}};" for contents, name in self._tables.items()),
                "struct Net {",
                f"static constexpr int latency = {cycles.pop()}, input_words = {len(inputs)};",
                f"static constexpr int held_words = {len(held)}, result_words = {len(results)};",
                "static void compute(const uint64_t* const* inputs, const uint64_t* held, uint64_t* const* results) {",
                *(f"const V {name} = load(inputs[{k}]);" for k, name in enumerate(inputs)),
                *(f"const V {name} = repeat(held[{k}]);" for k, name in enumerate(held)),
                *self._lines,
                *(f"save(results[{k}], {word});" for k, word in enumerate(results)),
                "}",
                "};",
                "",
            ]
        )

    def shell(self, module: str, ports: str, name: str) -> str:
        """Verilog that stands for the module."""
        names = {port.strip().removeprefix("\\"): port for port in ports.split(",")}
        declarations = "".join(
            f"  {port['direction']} [{len(port['bits']) - 1}:0] {names[key]};\n" for key, port in self._ports.items()
        )
        results = self._select("output", None)
        assignments, offset = "", 0
        for key in results:
            assignments += f"  assign {names[key]} = result[{offset} +: {len(self._ports[key]['bits'])}];\n"
            offset += self._pad(key)
        words = {
            is_held: ", ".join(
                f"{self._pad(key) - len(self._ports[key]['bits'])}'d0, {names[key]}"
                if self._pad(key) > len(self._ports[key]["bits"])
                else names[key]
                for key in reversed(self._select("input", is_held))
            )
            for is_held in (False, True)
        }
        last = {is_held: sum(map(self._pad, self._select("input", is_held))) - 1 for is_held in (False, True)}
        return _SHELL.format(
            module=module, ports=ports, name=name, declarations=declarations, assignments=assignments,
            inputs=last[False], held=last[True], results=offset - 1, input_words=words[False], held_words=words[True],
        )  # fmt: skip

    def _select(self, direction: str, is_held: bool | None) -> list[str]:
        held = {*self._held, "rst"}
        return [
            name
            for name, port in self._ports.items()
            if port["direction"] == direction and name != "clk" and is_held in (None, name in held)
        ]

    def _pad(self, port: str) -> int:
        return -(-len(self._ports[port]["bits"]) // _WORD_BITS) * _WORD_BITS

    def _load(self, ports: Sequence[str], is_held: bool) -> list[str]:
        variables = []
        for name in ports:
            bits = self._ports[name]["bits"]
            for first in range(0, len(bits), _WORD_BITS):
                variables.append(f"port{len(self._widths)}")
                self._name(variables[-1], bits[first : first + _WORD_BITS], None if is_held else 0)
        return variables

    def _name(self, variable: str, bits: Sequence[Any], cycle: int | None) -> None:
        self._widths[variable] = len(bits)
        for place, bit in enumerate(bits):
            self._places[bit], self._cycles[bit] = (variable, place), cycle

    def _find(self, bit: Any) -> tuple[Any, int]:
        """The bit behind all registers before `bit`, and how many those are."""
        registers = 0
        while bit in self._stored and registers <= len(self._stored):
            bit, registers = self._stored[bit], registers + 1
        return bit, registers

    def _sort_cells(self) -> list[dict[str, Any]]:
        """The cells, each behind those that it reads."""
        drivers = {bit: place for place, cell in enumerate(self._cells) for bit in _output(cell)}
        graph = TopologicalSorter[int]()
        for place, cell in enumerate(self._cells):
            inputs = (bits for port, bits in cell["connections"].items() if cell["port_directions"][port] == "input")
            read = {self._find(bit)[0] for bits in inputs for bit in bits}
            graph.add(place, *(drivers[bit] for bit in read if bit in drivers))
        try:
            return [self._cells[place] for place in graph.static_order()]
        except CycleError as error:
            raise DatapathError("a datapath must not feed back") from error

    def _value(self, bits: Sequence[Any]) -> tuple[list[str], int | None]:
        """Words of up to 64 bits, and the cycle in which they are there."""
        places: list[tuple[str, int] | str] = []
        cycles = set()
        for given in bits:
            bit, registers = self._find(given)
            if isinstance(bit, str):
                places.append("1" if bit == "1" else "0")
                continue
            places.append(self._places[bit])
            cycle = self._cycles[bit]
            if cycle is not None:
                cycles.add(cycle + registers)
        words = [self._word(places[first : first + _WORD_BITS]) for first in range(0, len(places), _WORD_BITS)]
        return words, _common(cycles)

    def _word(self, places: Sequence[tuple[str, int] | str]) -> str:
        """An expression for up to 64 bits: what lies side by side in one variable is taken at once."""
        constant, terms, at = 0, [], 0
        while at < len(places):
            first = places[at]
            if isinstance(first, str):
                constant, at = constant | int(first) << at, at + 1
                continue
            variable, place = first
            end = _run(places, at, 1)
            sign_end = _run(places, at, 0)
            term = f"({variable} >> {place})" if place else variable
            if sign_end > end:
                term, end = f"(-({term} & 1) & {_ones(sign_end - at)})", sign_end
            elif place + end - at < self._widths[variable]:
                term = f"({term} & {_ones(end - at)})"
            terms.append(f"({term} << {at})" if at else term)
            at = end
        if constant or not terms:
            terms.append(f"repeat({constant:#x}ull)")
        return terms[0] if len(terms) == 1 else f"({' | '.join(terms)})"

    def _compute(self, cell: dict[str, Any]) -> None:
        """Variables for a cell's output."""
        kind, output = cell["type"], _output(cell)
        if kind not in _OPERATIONS:
            raise DatapathError(f"a datapath's operations must be among {', '.join(_OPERATIONS)}, not {kind}")
        operands = _Operands(self, cell)
        results = _OPERATIONS[kind](operands)
        cycle = _common(operands.cycles)
        for place, result in enumerate(results):
            bits = output[place * _WORD_BITS : (place + 1) * _WORD_BITS]
            if kind in _SPILLING and len(bits) < _WORD_BITS:
                result = f"({result}) & {_ones(len(bits))}"
            self._name(self.add(result), bits, cycle)

    def add(self, expression: str) -> str:
        """Name of a new variable of that value."""
        name = f"v{len(self._lines)}"
        self._lines.append(f"const V {name} = {expression};")
        return name

    def table(self, memory: str) -> str:
        """Name of the array that holds what the memory does."""
        contents = ", ".join(map(str, self._contents[memory]))
        return self._tables.setdefault(contents, f"table{len(self._tables)}")


class _Operands:
    """The operands of a cell, as C++."""

    def __init__(self, netlist: _Netlist, cell: dict[str, Any]) -> None:
        self.netlist, self._cell = netlist, cell
        self.kind: str = cell["type"]
        self.cycles: set[int] = set()

    def parameter(self, name: str) -> Any:
        """A parameter's text."""
        return self._cell["parameters"].get(name, "0")

    @property
    def signed(self) -> bool:
        """Whether both operands are numbers with a sign."""
        return int(self.parameter("A_SIGNED"), 2) == 1

    def width(self, port: str) -> int:
        """Bits of a port."""
        return len(self._cell["connections"][port])

    def words(self, port: str, width: int | None = None) -> list[str]:
        """Words of up to 64 bits, the operand extended or cut to `width`."""
        bits = self._cell["connections"][port]
        if width is not None:
            filling = bits[-1] if self.signed else "0"
            bits = [*bits[:width], *[filling] * (width - len(bits))]
        words, cycle = self.netlist._value(bits)
        if cycle is not None:
            self.cycles.add(cycle)
        return words

    def word(self, port: str, width: int | None = None) -> str:
        """The operand in one word. Raises DatapathError where it is longer."""
        if (width or self.width(port)) > _WORD_BITS:
            raise DatapathError(f"{self.kind} in a datapath must have at most {_WORD_BITS} bits")
        return self.words(port, width)[0]

    def pairs(self, width: int) -> list[tuple[str, str]]:
        """Words of both operands."""
        return list(zip(self.words("A", width), self.words("B", width), strict=True))


def _select(cell: _Operands) -> list[str]:
    chosen = cell.netlist.add(f"-{cell.word('S')}")
    return [f"({zero} & ~{chosen}) | ({one} & {chosen})" for zero, one in cell.pairs(cell.width("Y"))]


def _combine(cell: _Operands) -> list[str]:
    return [f"{a} {_BITWISE[cell.kind]} {b}" for a, b in cell.pairs(cell.width("Y"))]


def _sum(cell: _Operands) -> list[str]:
    width = cell.width("Y")
    return [f"{cell.word('A', width)} {_SUMS[cell.kind]} {cell.word('B', width)}"]


def _order(cell: _Operands) -> list[str]:
    width = max(cell.width("A"), cell.width("B"))
    a, b = cell.word("A", width), cell.word("B", width)
    if cell.signed:
        a, b = (f"Signed({value} << {_WORD_BITS - width})" for value in (a, b))
    return [f"bit({a} {_ORDERS[cell.kind]} {b})"]


def _equal(cell: _Operands) -> list[str]:
    pairs = cell.pairs(max(cell.width("A"), cell.width("B")))
    differences = " | ".join(f"({a} ^ {b})" for a, b in pairs)
    return [f"bit(({differences}) {'==' if cell.kind == '$eq' else '!='} 0)"]


def _any(cell: _Operands) -> list[str]:
    return [f"bit(({' | '.join(cell.words('A'))}) {'==' if cell.kind == '$logic_not' else '!='} 0)"]


def _shift(cell: _Operands) -> list[str]:
    if cell.signed or int(cell.parameter("B_SIGNED"), 2):
        raise DatapathError(f"{cell.kind} in a datapath must have operands without a sign")
    distance = cell.word("B")
    is_inside = f"V({distance} < {_WORD_BITS})"  # C++ leaves further shifts open
    return [f"({cell.word('A')} >> ({distance} & {_WORD_BITS - 1})) & {is_inside}"]


_OPERATIONS: Mapping[str, Callable[[_Operands], list[str]]] = {
    "$mux": _select,
    "$not": lambda cell: [f"~{word}" for word in cell.words("A", cell.width("Y"))],
    **dict.fromkeys(_BITWISE, _combine),
    **dict.fromkeys(_SUMS, _sum),
    **dict.fromkeys(_ORDERS, _order),
    **dict.fromkeys(("$eq", "$ne"), _equal),
    **dict.fromkeys(("$reduce_or", "$reduce_bool", "$logic_not"), _any),
    "$reduce_and": lambda cell: [f"bit({cell.word('A')} == {_ones(cell.width('A'))})"],
    **dict.fromkeys(("$shift", "$shr"), _shift),
    "$memrd_v2": lambda cell: [f"look_up({cell.netlist.table(cell.parameter('MEMID'))}, {cell.word('ADDR')})"],
}
_SPILLING = ("$not", *_SUMS, "$shift", "$shr")
"""Operations that may leave ones above the width of their result."""


def _output(cell: dict[str, Any]) -> list[Any]:
    """Bits that a cell computes; none for registers, contents and remarks."""
    wires: dict[str, list[Any]] = cell["connections"]
    return wires.get("Y") or (wires["DATA"] if cell["type"].startswith("$memrd") else [])


def _run(places: Sequence[tuple[str, int] | str], first: int, step: int) -> int:
    """End of the places from `first` on that lie in one variable, each `step` above the one before."""
    start, end = places[first], first + 1
    while end < len(places) and places[end] == (start[0], int(start[1]) + step * (end - first)):
        end += 1
    return end


def _common(cycles: set[int]) -> int | None:
    if len(cycles) > 1:
        raise DatapathError(f"values that meet in a datapath must be there in the same cycle, not in {sorted(cycles)}")
    return next(iter(cycles), None)


def _ones(width: int) -> str:
    return f"{(1 << width) - 1:#x}ull"
