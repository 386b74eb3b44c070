"""Cells as C++: a function that settles all nets in order of their dependence, and one for a clock edge.

A byte a net. Registers come first, so that their new values are copied at once. Pins that nothing drives read
`open_level`. The text ends with the pins of the processor block, for `processor.hpp`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter

from nearflash.abi.errors import FormatError
from nearflash.boards.open.decode.cells import OPEN, Cell, View, key_of

__all__ = ["emit"]

_CHUNK = 1000
"""Statements of a function: compilers take long over longer ones."""
_DSP_WIDTHS = {"A": 30, "B": 18, "C": 48, "PCIN": 48, "ACIN": 30, "INMODE": 5, "OPMODE": 7, "ALUMODE": 4}
_DSP_PINS = ("CARRYIN", "CEA1", "CEA2", "CEB1", "CEB2", "CEC", "CEM", "CEP", "RSTA", "RSTB", "RSTC", "RSTM", "RSTP")
_DSP_NONE = ("ALUMODEREG", "CARRYINREG", "CARRYINSELREG", "INMODEREG", "OPMODEREG", "USE_DPORT", "USE_SIMD", "B_INPUT",
             "CLK_INVERTED")  # fmt: skip
"""What a slice of a design here does not have."""
_COMBINED = ("LUT", "MUX", "CARRY", "SUM", "RAM", "SRL", "BUFGCTRL")
_SIGNALS = {
    "araddr": 32, "arlen": 4, "arsize": 2, "arburst": 2, "arvalid": 1, "arready": 1, "rdata": 64, "rresp": 2,
    "rlast": 1, "rvalid": 1, "rready": 1, "awaddr": 32, "awlen": 4, "awsize": 2, "awburst": 2, "awvalid": 1,
    "awready": 1, "wdata": 64, "wstrb": 8, "wlast": 1, "wvalid": 1, "wready": 1, "bresp": 2, "bvalid": 1, "bready": 1,
}  # fmt: skip
_MASTER = _SIGNALS | {"arid": 12, "rid": 12, "awid": 12, "wid": 12, "bid": 12, "rdata": 32, "wdata": 32, "wstrb": 4}


def emit(cells: View) -> str:
    """The C++ text of a design around one processor block.

    Raises FormatError for a design with a loop of logic, with another clock than FCLK0 over one buffer, or with a block
    whose parameters the models here do not have.
    """
    return _Design(cells).text()


class _Design:
    def __init__(self, cells: View) -> None:
        self.cells = cells
        self.processor = next(key for key, cell in cells.items() if cell.kind == "PS7")
        registers = [key for key, cell in cells.items() if cell.kind == "FF"]
        combined = [key for key, cell in cells.items() if cell.kind in _COMBINED]
        blocks = [key for key, cell in cells.items() if cell.kind in ("DSP48E1", "RAMB18E1")]
        self.blocks = {key: f"block{place}" for place, key in enumerate(blocks)}
        #: Nets of the processor block that are no byte by themselves.
        self.copies = sorted({net for net in cells[self.processor].inputs.values()
                              if key_of(net) in self.blocks or net.startswith(OPEN)})  # fmt: skip
        late = [key for key in registers if not cells[key].config["sync"] and cells[key].inputs["SR"] != "0"]
        places = [
            *registers,
            "0",
            "1",
            *combined,
            *self.copies,
            *(f"{key}!" for key in late),
            *self._list_processor_outputs(),
        ]
        self.places = {name: place for place, name in enumerate(places)}
        self.registers, self.late = registers, frozenset(late)
        #: DSP slices whose A goes on to another.
        self.cascading = {key_of(net) for cell in cells.values() for net in cell.inputs.values() if ":ACOUT" in net}
        self._check_clocks()

    def text(self) -> str:
        """The whole text."""
        settle = [line for key in self._order() for line in self._settle(key)]
        settle += [f"bits[{self.places[net]}] = {self.net(net)};" for net in self.copies]
        edge = [line for key in self.cells for line in self._edge(key)]
        edge += [f"{name}.edge();" for name in self.blocks.values()]  # after all have read the others' outputs
        begin = [f"bits[{self.places[key]}] = {self.cells[key].config['init']};" for key in self.registers]
        begin += [f"bits[{self.places['1']}] = 1;"]
        begin += [f"memory{self.places[key]} = {cell.config['init']:#x}ull;"
                  for key, cell in self.cells.items() if cell.kind in ("RAM", "SRL")]  # fmt: skip
        begin += [f"{name} = decltype({name}){{}};" for name in self.blocks.values()]
        parts = [
            '#include <cstring>\n#include "blocks.hpp"\nusing namespace nearflash;\n',
            f"static uint8_t bits[{len(self.places)}], next_bits[{len(self.registers) or 1}];\n",
            "static int open_level;\n",
            *(self._declare(key) for key in self.cells),
            *_functions("settle", settle),
            *_functions("step", edge),
            f"static void edge() {{ step(); memcpy(bits, next_bits, {len(self.registers)}); }}\n",
            *_functions("begin", begin),
            self._pins(), '#include "processor.hpp"\n',
        ]  # fmt: skip
        return "".join(parts)

    def _list_processor_outputs(self) -> list[str]:
        nets = {net for cell in self.cells.values() for net in cell.inputs.values()}
        return sorted(net for net in nets if key_of(net) == self.processor)

    def _check_clocks(self) -> None:
        clocks = {net for cell in self.cells.values() for pin, net in cell.inputs.items()
                  if pin == "CK" or (cell.kind == "RAMB18E1" and pin in ("CLKARDCLK", "CLKBWRCLK"))
                  or (cell.kind == "DSP48E1" and pin == "CLK" and net not in ("0", "1"))} - {"0", "1"}  # fmt: skip
        sources = {self.cells[net].inputs.get("I0") for net in clocks if net in self.cells}
        if len(clocks) != 1 or sources != {f"{self.processor}:FCLKCLK0"}:
            raise FormatError(f"the design must have FCLK0 over one buffer as its only clock, not {sorted(clocks)[:3]}")

    def net(self, net: str) -> str:
        """The C++ expression of a net."""
        if net in ("0", "1"):
            return net
        if net.startswith(OPEN):
            return "open_level"
        key, _, pin = net.partition(":")
        if key in self.blocks:
            bus, index = re.fullmatch(r"([A-Z]+)(\d+)", pin).groups()  # type: ignore[union-attr]
            wide = self.cells[key].config.get("READ_WIDTH_A") == 36
            out, shift = (_WIDE if wide else _OUTPUTS).get(bus, (bus, 0))
            return f"({self.blocks[key]}.{out} >> {int(index) + shift} & 1)"
        return f"bits[{self.places[f'{net}!' if net in self.late else net]}]"

    def word(self, cell: Cell, bus: str, width: int) -> str:
        """The C++ expression of a bus of a cell's inputs, the lowest first; pins that it does not have read 0."""
        nets = [cell.inputs.get(f"{bus}{place}", "0") for place in range(width)]
        terms = [f"uint64_t({self.net(net)}) << {place}" for place, net in enumerate(nets) if net != "0"]
        return f"({' | '.join(terms)})" if terms else "0ull"

    def _depends(self, key: str) -> Iterable[str]:
        """The nets that a key's value follows within a cycle."""
        cell = self.cells[key]
        if cell.kind == "FF":
            return [cell.inputs["SR"]] if key in self.late else []
        if cell.kind == "DSP48E1":
            return _follow_dsp(cell, key in self.cascading)
        if cell.kind in ("RAM", "SRL"):
            return [net for pin, net in cell.inputs.items() if pin[0] == "R"]
        return cell.inputs.values() if cell.kind in _COMBINED else []

    def _order(self) -> Iterator[str]:
        graph = {key: {key_of(net) for net in self._depends(key)} & self.cells.keys() for key in self.cells}
        try:
            yield from TopologicalSorter(graph).static_order()
        except CycleError as loop:
            raise FormatError(f"a design must have no loop of logic, not {' to '.join(loop.args[1][:4])}") from None

    def _settle(self, key: str) -> Iterator[str]:
        cell = self.cells[key]
        ins = {
            pin: self.net(net) for pin, net in cell.inputs.items() if cell.kind not in ("DSP48E1", "RAMB18E1", "PS7")
        }
        value = {
            "LUT": lambda: f"{cell.config['table']:#x}ull >> {self.word(cell, 'I', len(ins))} & 1",
            "MUX": lambda: f"{ins['S']} ? {ins['I1']} : {ins['I0']}",
            "CARRY": lambda: f"{ins['S']} ? {ins['CI']} : {ins['DI']}",
            "SUM": lambda: f"{ins['S']} ^ {ins['CI']}",
            "BUFGCTRL": lambda: ins["I0"],
        }
        if cell.kind in value:
            yield f"bits[{self.places[key]}] = {value[cell.kind]()};"
        elif cell.kind in ("RAM", "SRL"):
            yield f"bits[{self.places[key]}] = memory{self.places[key]} >> {self.word(cell, 'R', 6)} & 1;"
        elif key in self.late:
            own = f"bits[{self.places[key]}]"
            yield f"bits[{self.places[f'{key}!']}] = {ins['SR']} ? {cell.config['set']} : {own};"
        elif cell.kind == "DSP48E1":
            yield self._load_dsp(key) + f"{self.blocks[key]}.settle();"

    def _edge(self, key: str) -> Iterator[str]:
        cell, place = self.cells[key], self.places.get(key)
        if cell.kind == "FF":
            d, ce, sr = (self.net(cell.inputs[pin]) for pin in ("D", "CE", "SR"))
            yield f"next_bits[{place}] = {sr} ? {cell.config['set']} : {ce} ? {d} : bits[{place}];"
        elif cell.kind == "SRL":
            yield (f"if ({self.net(cell.inputs['WE'])}) "
                   f"memory{place} = memory{place} << 1 | {self.net(cell.inputs['D'])};")  # fmt: skip
        elif cell.kind == "RAM":
            yield (f"if ({self.net(cell.inputs['WE'])}) {{ unsigned k = {self.word(cell, 'W', 6)}; memory{place} = "
                   f"(memory{place} & ~(1ull << k)) | uint64_t({self.net(cell.inputs['D'])}) << k; }}")  # fmt: skip
        elif cell.kind == "DSP48E1":
            yield self._load_dsp(key)
        elif cell.kind == "RAMB18E1":
            yield self._load_memory(key)

    def _declare(self, key: str) -> str:
        cell = self.cells[key]
        if cell.kind in ("RAM", "SRL"):
            return f"static uint64_t memory{self.places[key]};\n"
        if cell.kind == "RAMB18E1":
            if cell.config["contents"] or cell.config["DOA_REG"] or cell.config["DOB_REG"]:
                raise FormatError(f"{key} must have no contents and no output register, which no model here has")
            return f"static Ram {self.blocks[key]};\n"
        if cell.kind == "DSP48E1":
            given = [
                name for name in _DSP_NONE if cell.config[name] and (name, cell.inputs["CLK"]) != ("CLK_INVERTED", "0")
            ]
            if given or any(cell.inputs.get(f"CARRYINSEL{bit}", "0") != "0" for bit in range(3)):
                raise FormatError(f"{key} must have no {', '.join(given) or 'CARRYINSEL'}, which no model here has")
            registers = ", ".join(str(cell.config[f"{name}REG"]) for name in ("A", "B", "C", "M", "P"))
            return f"static Dsp<{registers}> {self.blocks[key]};\n"
        return ""

    def _load_dsp(self, key: str) -> str:
        cell, name = self.cells[key], self.blocks[key]
        words = {bus: self.word(cell, bus, width) for bus, width in _DSP_WIDTHS.items()}
        for bus in ("INMODE", "OPMODE", "ALUMODE"):
            if cell.config[f"{bus}_INVERTED"]:
                words[bus] = f"{words[bus]} ^ {cell.config[f'{bus}_INVERTED']}"
        words |= {pin: self.net(cell.inputs.get(pin, "0")) for pin in _DSP_PINS}
        if cell.config["CARRYIN_INVERTED"]:
            words["CARRYIN"] = f"!{words['CARRYIN']}"
        words["cascade"], words["early"] = str(cell.config["A_INPUT"]), str(cell.config.get("A_EARLY", 0))
        return "".join(f"{name}.{member} = {word}; " for member, word in words.items())

    def _load_memory(self, key: str) -> str:
        cell, name, config = self.cells[key], self.blocks[key], self.cells[key].config
        parts = [f"{name}.half = {int('X0Y1' in key)}; "]
        for port, letters in (("a", ("A", "ENARDEN", "RSTRAMARSTRAM", "ADDRARDADDR", "WEA", 4)),
                              ("b", ("B", "ENBWREN", "RSTRAMB", "ADDRBWRADDR", "WEBWE", 8))):  # fmt: skip
            side, enable, reset, address, strobe, strobes = letters
            wide = config["WRITE_WIDTH_B"] == 36 and side == "B"
            data = f"{self.word(cell, f'DI{side}DI', 16)} | {self.word(cell, f'DIP{side}DIP', 2)} << 32"
            if wide:
                data = (f"{self.word(cell, 'DIADI', 16)} | {self.word(cell, 'DIBDI', 16)} << 16 | "
                        f"{self.word(cell, 'DIPADIP', 2)} << 32 | {self.word(cell, 'DIPBDIP', 2)} << 34")  # fmt: skip
            write = "0" if config["WRITE_WIDTH_B"] == 36 and side == "A" else self.word(cell, strobe, strobes)
            numbers = (self._level(cell, enable), self._level(cell, reset), self.word(cell, address, 14), write)
            values = ", ".join(f"unsigned({number})" for number in numbers)
            parts.append(f"{name}.{port} = {{{config[f'READ_WIDTH_{side}']}, {config[f'WRITE_WIDTH_{side}']}, "
                         f"{config[f'WRITE_MODE_{side}']}, {values}, {data}}}; ")  # fmt: skip
        return "".join(parts)

    def _level(self, cell: Cell, pin: str) -> str:
        value = self.net(cell.inputs[pin])
        return f"!{value}" if cell.config[f"{pin}_INVERTED"] else value

    def _pins(self) -> str:
        """The processor block's buses."""
        lines = ["struct Bus { int width; const int* at; };\n"]
        ports = {"GP0": ("MAXIGP0", _MASTER), "HP0": ("SAXIHP0", _SIGNALS), "HP1": ("SAXIHP1", _SIGNALS)}
        for name, signals in (("MasterPort", _MASTER), ("MemoryPort", _SIGNALS)):
            lines.append(f"struct {name} {{ Bus {', '.join(signals)}; }};\n")
        for name, (prefix, signals) in ports.items():
            buses = [self._bus(f"{prefix}{signal.upper()}", width, lines) for signal, width in signals.items()]
            lines.append(
                f"static const {'MasterPort' if name == 'GP0' else 'MemoryPort'} {name} = {{{', '.join(buses)}}};\n"
            )
        for name, pin in (("RESET_N", "FCLKRESETN0"), ("INTERRUPT", "IRQF2P0")):
            bus = self._bus(pin, 1, lines)
            lines.append(f"static const Bus {name} = {bus};\n")
        return "".join(lines)

    def _bus(self, pin: str, width: int, lines: list[str]) -> str:
        inputs: Mapping[str, str] = self.cells[self.processor].inputs
        at = []
        for name in [pin] if width == 1 else [f"{pin}{place}" for place in range(width)]:
            net = inputs.get(name, f"{self.processor}:{name}")
            at.append(self.places.get(f"{net}!" if net in self.late else net, -1))
        lines.append(f"static const int at_{pin}[] = {{{', '.join(map(str, at))}}};\n")
        return f"{{{width}, at_{pin}}}"


_OUTPUTS = {"DOADO": ("A", 0), "DOPADOP": ("A", 32), "DOBDO": ("B", 0), "DOPBDOP": ("B", 32), "PCOUT": ("P", 0)}
"""Member of a block's model, and first bit, of each bus of outputs."""
_WIDE = {"DOADO": ("A", 0), "DOBDO": ("A", 16), "DOPADOP": ("A", 32), "DOPBDOP": ("A", 34)}
"""Of a block RAM that reads 36 bits."""


def _follow_dsp(cell: Cell, cascades: bool) -> Iterator[str]:
    """Nets that a slice's outputs follow within a cycle. cascades: whether another slice takes its A."""
    config, modes = cell.config, [cell.inputs[f"OPMODE{bit}"] for bit in range(7)]
    fixed = all(net in ("0", "1") for net in modes)
    mode = sum(int(net) << bit for bit, net in enumerate(modes)) if fixed else 0
    x, y, z = mode & 3, mode >> 2 & 3, mode >> 4
    inner = not config["PREG"]
    factors = inner and (not fixed or x == 3 or (x == 1 and not config["MREG"]))
    follows = {
        "ACIN" if config["A_INPUT"] else "A": not config["AREG"] and (factors or cascades),
        "B": not config["BREG"] and factors,
        "INMODE": factors,
        "C": not config["CREG"] and inner and (not fixed or y == 3 or z == 3),
        "PCIN": inner and (not fixed or z in (1, 5)),
        "OPMODE": inner, "ALUMODE": inner, "CARRYIN": inner,
    }  # fmt: skip
    for pin, net in cell.inputs.items():
        if follows.get(pin.rstrip("0123456789")):
            yield net


def _functions(name: str, statements: list[str]) -> Iterator[str]:
    chunks = [statements[at : at + _CHUNK] for at in range(0, len(statements), _CHUNK)]
    for number, chunk in enumerate(chunks):
        yield f"static void {name}{number}() {{\n" + "\n".join(chunk) + "\n}\n"
    yield f"static void {name}() {{ {' '.join(f'{name}{number}();' for number in range(len(chunks)))} }}\n"
