"""The netlist of a decoded bitstream: cells by place, and the pins that nothing drives.

Sites: slices, DSP48E1, RAMB18E1 (a RAMB36E1 is two), BUFGCTRL, PS7, and outputs to pads. Another site in use is an
error.

Source: AMD UG473 (block RAM), UG479 (DSP48E1), UG472 (clocking), UG471 (SelectIO).
"""

import re
from collections.abc import Mapping
from copy import copy
from functools import cached_property

from nearflash.abi.errors import FormatError
from nearflash.boards.open.database import PartDatabase
from nearflash.boards.open.decode.cells import OPEN, Cell, View, collect, fold_inversions
from nearflash.boards.open.decode.fabric import Fabric, SitePin
from nearflash.boards.open.decode.slices import Slice

__all__ = ["UNREAD_PINS", "DecodedNetlist"]

UNREAD_PINS = {
    "PS7": r"TEST.*|DEBUGSELECT\d+|MIO\d+|DDR(?!ARB).*|PSCLK|PSPORB|PSSRSTB",  # no wire of the fabric reaches these
    "RAMB18E1": r"REGCLK.*|RDRCLK",  # of output registers, which no design here has
}
"""Input pins of sites in use that may have no driver, as they have a known level or none is read."""
_CASCADES = re.compile(r"([ABP]CIN|CARRYCASCIN|MULTSIGNIN)\d*")
_RAM_PIN = re.compile(r"^BRAM_(?:FIFO18|RAMB18)_")


class DecodedNetlist:
    """Cells of a bitstream by the features of its tiles.

    Raises FormatError for a configuration that is none: two drivers of a wire, an inner multiplexer without an input, a
    site that nothing here reads.
    """

    def __init__(self, database: PartDatabase, features: Mapping[str, frozenset[str]]) -> None:
        self.fabric = Fabric(database, features)
        #: Site pins of cells in use that nothing drives, but for UNREAD_PINS.
        self.undriven: set[str] = set()
        self._sites: dict[str, tuple[str, int]] = {}
        self._slices: dict[str, Slice] = {}
        for tile in [*self.fabric.configuration, *database.find_tiles("PS7")]:
            for index, site in enumerate(self.fabric.sites(tile)):
                if site["type"] != "RAMBFIFO36E1":
                    self._sites[self._place(tile, index)] = (tile, index)

    def cells(self, keep: frozenset[str] = frozenset()) -> View:
        """All cells that registers, memories, blocks and pads need. keep: keys of LUTs that are no wires."""
        return collect(self.roots, self.read, lambda key: key not in keep)

    @cached_property
    def roots(self) -> list[str]:
        """Keys of cells with a state, or that the world sees."""
        found: set[str] = set()
        for place, (tile, index) in self._sites.items():
            kind, names = self.fabric.sites(tile)[index]["type"], self._features(tile, index)
            if kind.startswith("SLICE"):
                found |= self._slice(place).list_roots()
            elif kind in ("FIFO18E1", "RAMB18E1") and "IN_USE" in names:
                found.add(f"{place}.RAMB18E1")
            elif kind == "DSP48E1" and any(name.startswith("Z") for name in names):
                found.add(f"{place}.DSP48E1")
            elif kind == "PS7":
                found.add(f"{place}.PS7")
            elif kind.startswith("IOB33") and any(".DRIVE." in name for name in names):
                found.add(f"{place}.OUTBUF")
        return sorted(found)

    def read(self, key: str) -> Cell:
        """The cell of a key."""
        place, _, bel = key.rpartition(".")
        tile, index = self._sites[place]
        if self.fabric.sites(tile)[index]["type"].startswith("SLICE"):
            return self._slice(place).read(bel)
        names = self._features(tile, index)
        match bel:
            case "DSP48E1":
                config = _dsp_config(names)
                cell = fold_inversions(Cell(bel, config, self._inputs(tile, index, bel)))
                if cascades := _list_cascades(cell):
                    cell = Cell(bel, cell.config, {**cell.inputs, **self._inputs(tile, index, bel, cascades)})
                return cell
            case "RAMB18E1":
                return fold_inversions(Cell(bel, _memory_config(names), self._inputs(tile, index, bel)))
            case "PS7":
                return Cell(bel, {}, self._inputs(tile, index, bel))
            case "BUFGCTRL":
                if not {"IN_USE", "ZINV_CE0", "ZINV_S0", "IS_IGNORE1_INVERTED"} <= names:
                    raise FormatError(f"{place} must be on, with its input 0, not {', '.join(sorted(names)) or 'off'}")
                return Cell(bel, {}, {"I0": self._net(SitePin(tile, index, "I0"))})
            case _:
                return Cell("OUTBUF", {}, {"IN": self._net(SitePin(tile, index, "O"))})

    def replace_tile(self, tile: str, names: frozenset[str]) -> "DecodedNetlist":
        """The netlist of other features of one tile, with cells at the same places."""
        other = copy(self)
        other.fabric, other.undriven, other._slices = self.fabric.replace_tile(tile, names), set(), {}
        return other

    def read_pins(self, place: str, pins: list[str]) -> list[str]:
        """Nets at input pins of a site."""
        tile, index = self._sites[place]
        return [self._net(SitePin(tile, index, pin)) for pin in pins]

    def name_feature(self, place: str, name: str) -> tuple[str, str]:
        """A feature of a slice: its tile, and its whole name there."""
        tile, index = self._sites[place]
        site = self.fabric.sites(tile)[index]
        return tile, f"{site['type']}_{site['name'][:2]}.{name}"

    def _place(self, tile: str, index: int) -> str:
        site = self.fabric.sites(tile)[index]
        return f"{tile}/{site['prefix']}_{site['name']}"

    def _slice(self, place: str) -> Slice:
        if place not in self._slices:
            tile, index = self._sites[place]
            self._slices[place] = Slice(
                place, self._features(tile, index), lambda pin: self._net(SitePin(tile, index, pin))
            )
        return self._slices[place]

    def _features(self, tile: str, index: int) -> frozenset[str]:
        """Features of a site, without its name; ties of a DSP slice are pips."""
        site = self.fabric.sites(tile)[index]
        name, kind = site["name"], site["type"]
        half = {"SLICEL": f"SLICEL_{name[:2]}", "SLICEM": f"SLICEM_{name[:2]}", "FIFO18E1": "RAMB18_Y0",
                "RAMB18E1": "RAMB18_Y1", "DSP48E1": f"DSP48.DSP_{name[-1]}", "BUFGCTRL": f"BUFGCTRL.BUFGCTRL_{name}",
                "BUFHCE": f"BUFHCE.BUFHCE_{name}", "IOB33S": f"IOB_{_flip(name)}", "IOB33M": f"IOB_{_flip(name)}",
                "OLOGICE3": f"OLOGIC_{_flip(name)}"}.get(kind)  # fmt: skip
        return frozenset(
            feature.removeprefix(f"{half}.") for feature in self.fabric.configuration.get(tile, ())
            if half and feature.startswith(f"{half}.")
        )  # fmt: skip

    def _inputs(self, tile: str, index: int, kind: str, cascades: tuple[str, ...] = ()) -> dict[str, str]:
        """Nets at a block's input pins, by the names that its primitive has.

        cascades: the buses from a neighbour to list, alone; else all other pins.
        """
        site, nets = self.fabric.sites(tile)[index], {}
        directions = self.fabric.database.pin_directions(site["type"])
        for pin, wire in site["site_pins"].items():
            cascade = _CASCADES.fullmatch(pin)
            if directions[pin] != "IN" or (cascade[1] not in cascades if cascade else cascades):
                continue
            name = _RAM_PIN.sub("", wire["wire"]) if kind == "RAMB18E1" and wire else pin
            if not re.fullmatch(UNREAD_PINS.get(kind, ""), name):
                nets[name] = self._net(SitePin(tile, index, pin))
        return nets

    def _net(self, pin: SitePin) -> str:
        """The net at a site's input pin."""
        source = self.fabric.drive(*pin)
        if source is None:
            name = f"{self._place(pin.tile, pin.site)}.{pin.pin}"
            self.undriven.add(name)
            return OPEN + name
        return str(source) if isinstance(source, int) else self._output(source)

    def _output(self, pin: SitePin) -> str:
        """The net of a site's output pin."""
        place, site = self._place(pin.tile, pin.site), self.fabric.sites(pin.tile)[pin.site]
        self._sites.setdefault(place, (pin.tile, pin.site))
        kind = site["type"]
        if kind.startswith("SLICE"):
            return self._slice(place).output(pin.pin)
        names = self._features(pin.tile, pin.site)
        if kind == "BUFHCE":
            self._require(place, {"IN_USE", "ZINV_CE"}, names)
            return self._net(pin._replace(pin="I"))
        if kind == "OLOGICE3":
            self._require(place, {"OMUX.D1", "OQUSED"}, names)
            return self._net(pin._replace(pin="D1"))
        if kind == "BUFGCTRL":
            return f"{place}.BUFGCTRL"
        if kind in ("FIFO18E1", "RAMB18E1"):
            wire = site["site_pins"][pin.pin]["wire"]
            return f"{place}.RAMB18E1:{_RAM_PIN.sub('', wire)}"
        if kind in ("DSP48E1", "PS7"):
            return f"{place}.{kind}:{pin.pin}"
        raise FormatError(f"{place} must be a site that is read here, not {kind}")

    def _require(self, place: str, wanted: set[str], names: frozenset[str]) -> None:
        if not wanted <= names:
            raise FormatError(f"{place} must have {', '.join(sorted(wanted - names))}, as its output is in use")


def _flip(name: str) -> str:
    """A site of an IO tile as prjxray's features name it: they count as the wires do, against the grid."""
    return f"Y{1 - int(name[-1])}"


def _list_cascades(cell: Cell) -> tuple[str, ...]:
    """Buses from the neighbour that a DSP slice reads: A and B by an attribute, P where OPMODE may choose it."""
    high = [cell.inputs[f"OPMODE{bit}"] for bit in (4, 5)]
    chosen = [("ACIN", cell.config["A_INPUT"]), ("BCIN", cell.config["B_INPUT"]), ("PCIN", high in (["1", "0"],) or
              not set(high) <= {"0", "1"})]  # fmt: skip
    return tuple(bus for bus, is_read in chosen if is_read)


def _dsp_config(names: frozenset[str]) -> dict[str, int]:
    """Registers, inversions and inputs of a DSP slice."""
    registers = (
        "ADREG",
        "ALUMODEREG",
        "CARRYINREG",
        "CARRYINSELREG",
        "CREG",
        "DREG",
        "INMODEREG",
        "MREG",
        "OPMODEREG",
        "PREG",
    )
    config = {name: int(f"Z{name}[0]" not in names) for name in registers}
    for side in "AB":
        early = f"Z{side}REG_2_{side}CASCREG_1" not in names
        config[f"{side}REG"] = 0 if f"{side}REG_0" in names else 2 if f"{side}REG_2" in names or early else 1
        if early:
            config[f"{side}_EARLY"] = 1  # the first of two registers goes on to the next slice
        config[f"{side}_INPUT"] = int(f"{side}_INPUT[0]" in names)
    for bus, width in (("ALUMODE", 4), ("INMODE", 5), ("OPMODE", 7)):
        config[f"{bus}_INVERTED"] = sum((f"ZIS_{bus}_INVERTED[{bit}]" not in names) << bit for bit in range(width))
    for pin in ("CARRYIN", "CLK"):
        config[f"{pin}_INVERTED"] = int(f"ZIS_{pin}_INVERTED" not in names)
    config["USE_DPORT"] = int("USE_DPORT[0]" in names)
    config["USE_SIMD"] = int(any(name.startswith("USE_SIMD") for name in names))
    return config


def _memory_config(names: frozenset[str]) -> dict[str, int | str]:
    """Widths, modes, output registers and inversions of half a block RAM, and its contents."""
    config: dict[str, int | str] = {}
    for kind in ("READ", "WRITE"):
        for side in "AB":
            start = f"{kind}_WIDTH_{side}_"
            widths = [int(name.removeprefix(start)) for name in names if name.startswith(start)]
            config[f"{kind}_WIDTH_{side}"] = max(widths, default=1)
        if f"SDP_{kind}_WIDTH_36" in names:
            config[f"{kind}_WIDTH_{'A' if kind == 'READ' else 'B'}"] = 36
    for side in "AB":
        start = f"WRITE_MODE_{side}_"
        modes = [name.removeprefix(start) for name in names if name.startswith(start)]
        config[f"WRITE_MODE_{side}"] = "".join(modes) or "WRITE_FIRST"
        config[f"DO{side}_REG"] = int(f"DO{side}_REG" in names)
    pins = ("CLKARDCLK", "CLKBWRCLK", "ENARDEN", "ENBWREN", "RSTRAMARSTRAM", "RSTRAMB", "RSTREGARSTREG", "RSTREGB")
    config |= {f"{pin}_INVERTED": int(f"ZINV_{pin}" not in names) for pin in pins}
    config["contents"] = int(any(re.match(r"INITP?_..\[", name) for name in names))
    for name in ("ZINIT_A", "ZINIT_B", "ZSRVAL_A", "ZSRVAL_B"):
        config[name] = sum(feature.startswith(f"{name}[") for feature in names)
    return config
