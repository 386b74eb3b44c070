"""nextpnr's routed netlist as cells by place: what a bitstream of it must be.

nextpnr writes its cells in its JSON with the BEL of each; which wires a net takes does not matter here.
Source: nextpnr 0.11.1, himbaechel/uarch/xilinx (pack*.cc: cells and their ports, fasm.cc: what each parameter means).
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from nearflash.abi.errors import FormatError
from nearflash.boards.open.database import PartDatabase
from nearflash.boards.open.decode.cells import Cell, View, collect, fold_inversions, make_lut
from nearflash.boards.open.ties import CONSTANT_NETS, locate

__all__ = ["read_routed"]

_BLOCKS = {"DSP48E1_DSP48E1": "DSP48E1", "PS7_PS7": "PS7", "BUFGCTRL": "BUFGCTRL", "IOB33_OUTBUF": "OUTBUF",
           "RAMB18E1_RAMB18E1": "RAMB18E1", "RAMB36E1_RAMB36E1": "RAMB36E1"}  # fmt: skip
_SRL, _RAM = ("SRL16E", "SRLC32E"), ("RAMD32", "RAMS32", "RAMD64E", "RAMS64E")


def read_routed(database: PartDatabase, cells: Mapping[str, Any]) -> View:
    """All cells that registers, memories, blocks and pads of a routed netlist need (nextpnr's JSON, `cells` of top).

    Raises FormatError for a cell of a kind that nothing here reads.
    """
    view = _Reader(database, cells)
    return collect(view.roots, view.read, lambda key: False)


class _Reader:
    """Cells by place, with the nets at their inputs by what drives them."""

    def __init__(self, database: PartDatabase, cells: Mapping[str, Any]) -> None:
        self.roots: list[str] = []
        self._cells: dict[str, tuple[str, Callable[[], Cell]]] = {}
        self._drivers: dict[int, str] = {}
        for cell in cells.values():
            kind = cell["type"]
            if kind in CONSTANT_NETS:
                self._drivers[cell["connections"]["Y"][0]] = str(CONSTANT_NETS[kind])
            elif kind != "PAD":
                self._place(database, cell)

    def read(self, key: str) -> Cell | None:
        """The cell of a key. Raises FormatError for one that no cell is at."""
        if key not in self._cells:
            raise FormatError(f"a routed netlist must have a cell at {key}, where a net comes from")
        return self._cells[key][1]()

    def _place(self, database: PartDatabase, cell: Mapping[str, Any]) -> None:
        tile, site, x, y, bel = locate(database, cell)
        kind, pins = cell["type"], cell["connections"]
        place = f"{tile}/{site}_X{x}Y{y}"
        if kind == "CARRY4":
            self._place_carry(place, cell)
        elif kind == "RAMB36E1_RAMB36E1":
            for half in (0, 1):
                self._add(f"{tile}/RAMB18_X0Y{half}.RAMB18E1", cell, partial(self._memory_half, cell, half))
                self._name_outputs(f"{tile}/RAMB18_X0Y{half}.RAMB18E1", cell, half)
        elif kind in ("SLICE_LUTX", "SLICE_FFX", "SELMUX2_1"):
            reads = {"SLICE_LUTX": self._lut, "SLICE_FFX": self._register, "SELMUX2_1": self._wide}
            self._add(f"{place}.{bel}", cell, lambda: reads[kind](cell, bel))
            for pin in ("O6", "O5", "Q", "OUT"):
                self._drivers.update(dict.fromkeys(pins.get(pin, ()), f"{place}.{bel}"))
        elif kind in _BLOCKS:
            name = _BLOCKS[kind]
            key = f"{database.find_tiles('PS7')[0]}/PS7_X0Y0.PS7" if name == "PS7" else f"{place}.{name}"
            self._add(key, cell, lambda: self._block(name, cell))
            self._name_outputs(key, cell)
        else:
            raise FormatError(f"a routed netlist must have cells that are read here, not {kind}")

    def _add(self, key: str, cell: Mapping[str, Any], read: Callable[[], Cell]) -> None:
        kind = cell["type"]
        self._cells[key] = kind, read
        if kind not in ("SLICE_LUTX", "SELMUX2_1", "CARRY4", "BUFGCTRL"):
            self.roots.append(key)

    def _name_outputs(self, key: str, cell: Mapping[str, Any], half: int | None = None) -> None:
        """Nets of a block's outputs: of one output by its key, of several by the pins' names."""
        for pin, direction in cell["port_directions"].items():
            if direction == "output" and cell["connections"][pin]:
                name = pin if half is None else _half_pin(pin, half)
                if name is not None:
                    single = cell["type"] in ("BUFGCTRL", "IOB33_OUTBUF")
                    self._drivers[cell["connections"][pin][0]] = key if single else f"{key}:{name}"

    def _net(self, cell: Mapping[str, Any], pin: str, default: str = "?") -> str:
        nets = cell["connections"].get(pin)
        return self._drivers.get(nets[0], f"?{pin}") if nets else default

    def _lut(self, cell: Mapping[str, Any], bel: str) -> Cell:
        kind, attributes = cell["attributes"]["X_ORIG_TYPE"], cell["attributes"]
        init = _bits(cell["parameters"].get("INIT", "0"))
        if kind in _SRL or kind in _RAM:
            return self._memory(cell, bel, init)
        inputs = {}
        for pin in range(1, 7):
            for name in attributes.get(f"X_ORIG_PORT_A{pin}", "").split():
                inputs[int(name.removeprefix("I"))] = self._net(cell, f"A{pin}")
        if sorted(inputs) != list(range(int(kind.removeprefix("LUT")))):
            raise FormatError(f"a routed {kind} must have all its inputs, not {sorted(inputs)}")
        return make_lut(init, [inputs[place] for place in sorted(inputs)])

    def _memory(self, cell: Mapping[str, Any], bel: str, init: int) -> Cell:
        kind = cell["attributes"]["X_ORIG_TYPE"]
        small = kind in ("SRL16E", "RAMD32", "RAMS32")
        pins = range(2 if kind in _SRL else 1, 6 if small else 7)
        inputs = {f"R{place}": self._net(cell, f"A{pin}") for place, pin in enumerate(pins)}
        if kind in _RAM:
            inputs |= {f"W{place}": self._net(cell, f"WA{pin}") for place, pin in enumerate(pins)}
        data = "DI2" if cell["connections"].get("DI2") else "DI1"
        inputs |= {"D": self._net(cell, data), "WE": self._net(cell, "WE", "1"), "CK": self._net(cell, "CLK")}
        return Cell("SRL" if kind in _SRL else "RAM", {"init": init, "bits": len(pins)}, inputs)

    def _register(self, cell: Mapping[str, Any], bel: str) -> Cell:
        kind = cell["attributes"]["X_ORIG_TYPE"]
        if kind not in ("FDRE", "FDSE", "FDCE", "FDPE") or _bits(cell["parameters"].get("IS_C_INVERTED", "0")):
            raise FormatError(f"a routed register must be of the rising edge, not {kind}")
        config = {"init": int(cell["parameters"].get("INIT", "x")[-1] == "1"), "set": int(kind in ("FDSE", "FDPE")),
                  "sync": int(kind in ("FDRE", "FDSE"))}  # fmt: skip
        return Cell("FF", config, {"D": self._net(cell, "D"), "CK": self._net(cell, "CK"),
                                   "CE": self._net(cell, "CE", "1"), "SR": self._net(cell, "SR", "0")})  # fmt: skip

    def _wide(self, cell: Mapping[str, Any], bel: str) -> Cell:
        return Cell("MUX", {}, {pin: self._net(cell, name) for pin, name in (("I0", "0"), ("I1", "1"), ("S", "S0"))})

    def _place_carry(self, place: str, cell: Mapping[str, Any]) -> None:
        pins = cell["connections"]
        for bit in range(4):
            self._add(f"{place}.CO{bit}", cell, partial(self._carry, place, cell, bit, "CARRY"))
            self._add(f"{place}.O{bit}", cell, partial(self._carry, place, cell, bit, "SUM"))
            for name in (f"CO{bit}", f"O{bit}"):
                self._drivers.update(dict.fromkeys(pins.get(name, ()), f"{place}.{name}"))

    def _carry(self, place: str, cell: Mapping[str, Any], bit: int, kind: str) -> Cell:
        first = self._net(cell, "CIN", self._net(cell, "CYINIT", "0"))
        inputs = {"S": self._net(cell, f"S{bit}"), "CI": f"{place}.CO{bit - 1}" if bit else first}
        if kind == "CARRY":
            inputs["DI"] = self._net(cell, f"DI{bit}")
        return Cell(kind, {}, inputs)

    def _block(self, kind: str, cell: Mapping[str, Any]) -> Cell:
        config: dict[str, Any] = {}
        if kind == "DSP48E1":
            config = _dsp_config(cell["parameters"])
        elif kind == "RAMB18E1":
            config = _memory_config(cell["parameters"], 1)
        pins = ["I0"] if kind == "BUFGCTRL" else [pin for pin, way in cell["port_directions"].items() if way == "input"]
        inputs = {pin: self._net(cell, pin) for pin in pins if cell["connections"][pin]}
        for level, name in enumerate(("DSP_GND_PINS", "DSP_VCC_PINS")):
            inputs |= dict.fromkeys(cell["attributes"].get(name, "").split(), str(level))
        return fold_inversions(Cell(kind, config, inputs))

    def _memory_half(self, cell: Mapping[str, Any], half: int) -> Cell:
        inputs = {}
        for pin, way in cell["port_directions"].items():
            name = _half_pin(pin, half)
            if way == "input" and name is not None and cell["connections"][pin]:
                inputs[name] = self._net(cell, pin)
        return fold_inversions(Cell("RAMB18E1", _memory_config(cell["parameters"], 2), inputs))


def _half_pin(pin: str, half: int) -> str | None:
    """The name that a pin of a RAMB36E1 has in one half; None for a pin of the other half.

    Even bits of data are in the lower half. The lowest bit of an address chooses within a pair of halves' bits, and the
    highest between cascaded blocks: a half has the 14 between.
    """
    bus, number = re.fullmatch(r"(\w+?)(\d*)", pin).groups()  # type: ignore[union-attr]
    if bus.startswith(("DI", "DO")):
        return f"{bus}{int(number) // 2}" if int(number) % 2 == half else None
    if bus[-1] != "LU"[half]:
        return None
    if bus.startswith("ADDR"):
        return f"{bus[:-1]}{int(number) - 1}" if 1 <= int(number) <= 14 else None
    return bus[:-1] + number


def _bits(text: str) -> int:
    return int(re.sub("[xz]", "0", text), 2)


def _dsp_config(parameters: Mapping[str, str]) -> dict[str, int]:
    registers = ("ADREG", "ALUMODEREG", "CARRYINREG", "CARRYINSELREG", "CREG", "DREG", "INMODEREG", "MREG", "OPMODEREG",
                 "PREG", "AREG", "BREG")  # fmt: skip
    config = {name: _bits(parameters.get(name, "1")) for name in registers}
    for side in "AB":
        if (config[f"{side}REG"], _bits(parameters.get(f"{side}CASCREG", "1"))) == (2, 1):
            config[f"{side}_EARLY"] = 1
    config |= {f"{side}_INPUT": int(parameters.get(f"{side}_INPUT", "DIRECT").strip() == "CASCADE") for side in "AB"}
    for bus, width in (("ALUMODE", 4), ("INMODE", 5), ("OPMODE", 7)):
        config[f"{bus}_INVERTED"] = _bits(parameters.get(f"IS_{bus}_INVERTED", "0")) | sum(
            _bits(parameters.get(f"IS_{bus}[{bit}]_INVERTED", "0")) << bit for bit in range(width)
        )
    config |= {f"{pin}_INVERTED": _bits(parameters.get(f"IS_{pin}_INVERTED", "0")) for pin in ("CARRYIN", "CLK")}
    config["USE_DPORT"] = int(parameters.get("USE_DPORT", "FALSE").strip() == "TRUE")
    config["USE_SIMD"] = int(parameters.get("USE_SIMD", "ONE48").strip() != "ONE48")
    return config


def _memory_config(parameters: Mapping[str, str], halves: int) -> dict[str, int | str]:
    config: dict[str, int | str] = {}
    for kind in ("READ", "WRITE"):
        for side in "AB":
            width = _bits(parameters.get(f"{kind}_WIDTH_{side}", "0"))
            config[f"{kind}_WIDTH_{side}"] = max(width // halves, 1)
    for wide, other in (("READ_WIDTH_A", "READ_WIDTH_B"), ("WRITE_WIDTH_B", "WRITE_WIDTH_A")):
        if config[wide] == 36:  # both ports together
            config[other] = 18
    for side in "AB":
        config[f"WRITE_MODE_{side}"] = parameters.get(f"WRITE_MODE_{side}", "WRITE_FIRST").strip()
        config[f"DO{side}_REG"] = _bits(parameters.get(f"DO{side}_REG", "0"))
    pins = ("CLKARDCLK", "CLKBWRCLK", "ENARDEN", "ENBWREN", "RSTRAMARSTRAM", "RSTRAMB", "RSTREGARSTREG", "RSTREGB")
    config |= {f"{pin}_INVERTED": _bits(parameters.get(f"IS_{pin}_INVERTED", "0")) for pin in pins}
    config["contents"] = int(any("1" in value for name, value in parameters.items() if name.startswith("INIT")))
    return config | dict.fromkeys(("ZINIT_A", "ZINIT_B", "ZSRVAL_A", "ZSRVAL_B"), 18)
