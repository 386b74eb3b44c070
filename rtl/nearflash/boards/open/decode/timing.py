"""Timing of a decoded bitstream, by prjxray's delays of everything between its registers, at the slow corner.

Each input pin of a site is a net of its own, behind the route to it. Routes through LUTs are LUTs.
Delays and checks of cells are those of prjxray's SDF files, by their place in a slice where it has them.

Left out: the fast corner, jitter, pads, asynchronous resets (the recovery time of a reset counts as its setup). The
database has no delays of the clock tree's trunk: REGION_SKEW_PS and TRUNK_PS stand for them.

Source: prjxray's `timings/*.sdf` and `tile_type_*.json`.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from nearflash.abi.errors import FormatError
from nearflash.boards.open.database import PartDatabase
from nearflash.boards.open.decode.cells import OPEN, Cell, View, collect, key_of
from nearflash.boards.open.decode.fabric import SitePin
from nearflash.boards.open.decode.features import decode_bits
from nearflash.boards.open.decode.netlist import DecodedNetlist
from nearflash.boards.open.decode.paths import Check, Clock, Delay, TimingGraph, TimingResult, analyse
from nearflash.boards.open.decode.routes import NONE, Figures, PipFabric, Routes, find_limits
from nearflash.boards.open.frames import Place
from nearflash.boards.open.nextpnr.sdf import Entry, read_cells
from nearflash.boards.open.nextpnr.timing import dsp_cells

__all__ = ["REGION_SKEW_PS", "TRUNK_PS", "PinNetlist", "make_graph", "read_pins", "time_bits", "time_netlist"]

REGION_SKEW_PS = 300
"""Allowance for the skew between the clocks of two regions: an assumption, nothing that was measured."""

TRUNK_PS = 2_000
"""Allowance for a signal from logic on the clock tree's trunk, where nextpnr sends resets and enables of many cells.

Published Vivado reports of Zynq-7000 designs state 1.67 and 1.68 ns from a global buffer to a register's clock, the
regional buffer included, which has its own delay here."""

_FILES = {"SLICEL": "slicel", "SLICEM": "slicem", "BRAM": "BRAM_L", "DSP": "DSP_L", "PS7": "PSS2",
          "BUFG": "CLK_BUFG_BOT_R", "BUFH": "CLK_HROW_BOT_R"}  # fmt: skip
_DIGITS = "0123456789"
#: Pins of a RAMB18E1 as SDF files have them: those of the upper half of a RAMB36E1.
_RAM_PINS = {
    "ADDRARDADDR": "ADDRAU", "ADDRBWRADDR": "ADDRBU", "DIADI": "DIADIU", "DIBDI": "DIBDIU", "DIPADIP": "DIPADIPU",
    "DIPBDIP": "DIPBDIPU", "WEA": "WEAU", "WEBWE": "WEBU", "ENARDEN": "ENARDENU", "ENBWREN": "ENBWRENU",
    "RSTRAMARSTRAM": "RSTRAMAU", "RSTRAMB": "RSTRAMBU", "REGCEAREGCE": "REGCEAL", "REGCEB": "REGCEBU",
    "RSTREGARSTREG": "RSTREGAU", "RSTREGB": "RSTREGBU", "DOADO": "DOADOU", "DOBDO": "DOBDOU", "DOPADOP": "DOPADOPU",
    "DOPBDOP": "DOPBDOPU",
}  # fmt: skip
_WRITE_MODES = {"WRITE_FIRST": "WF", "READ_FIRST": "RF", "NO_CHANGE": "NC"}
_RAM_CLOCKS = ("CLKARDCLK", "CLKBWRCLK")


def time_bits(database: PartDatabase, bits: set[Place]) -> TimingResult:
    """Check the timing of the netlist of a bitstream's bits. Raises FormatError as `read_pins` and `time_netlist`."""
    return time_netlist(read_pins(database, bits))


def read_pins(database: PartDatabase, bits: set[Place]) -> "PinNetlist":
    """The netlist of a bitstream's bits. Raises FormatError for bits that are none."""
    return PinNetlist(database, decode_bits(database, bits).features)


def time_netlist(netlist: "PinNetlist") -> TimingResult:
    """Check the timing of a netlist. Raises FormatError for a cell whose delays the database has not."""
    return analyse(make_graph(netlist), REGION_SKEW_PS)


def make_graph(netlist: "PinNetlist") -> TimingGraph:
    """The timing graph of a decoded netlist."""
    return _Builder(netlist).build()


class PinNetlist(DecodedNetlist):
    """A decoded netlist in which each driven input pin of a site is a cell, `TILE/SITE@PIN`, of the kind PIN."""

    fabric: PipFabric

    def __init__(self, database: PartDatabase, features: Mapping[str, frozenset[str]]) -> None:
        super().__init__(database, features)
        self.fabric = PipFabric(database, features)
        #: By name: the pin, and the pin of a site that drives it.
        self.pins: dict[str, tuple[SitePin, SitePin]] = {}

    def cells(self, keep: frozenset[str] = frozenset()) -> View:
        """All cells; LUTs that hand one input on are cells too."""
        return collect(self.roots, self.read, lambda key: False)

    def read(self, key: str) -> Cell:
        """The cell of a key."""
        return Cell("PIN", {}, {"I": self._output(self.pins[key][1])}) if "@" in key else super().read(key)

    def find_site_type(self, key: str) -> str:
        """The type of the site that a cell is in."""
        tile, site = self._sites[key.rpartition(".")[0]]
        kind: str = self.fabric.sites(tile)[site]["type"]
        return kind

    def _net(self, pin: SitePin) -> str:
        source = self.fabric.drive(*pin)
        if source is None or isinstance(source, int):
            return super()._net(pin)
        name = f"{self._place(pin.tile, pin.site)}@{pin.pin}"
        self.pins[name] = pin, source
        return name


class _Builder:
    """Goes over a netlist's cells, each of which adds arcs, launches and checks to the graph."""

    def __init__(self, netlist: PinNetlist) -> None:
        self.netlist, self.cells, self.graph = netlist, netlist.cells(), TimingGraph()
        self.figures, self.routes = Figures(netlist.fabric.database, _FILES), Routes(netlist.fabric)
        #: Nets of blocks with several outputs that something reads, by key.
        self.outputs: dict[str, set[str]] = defaultdict(set)
        for cell in self.cells.values():
            for net in cell.inputs.values():
                self.outputs[key_of(net)].add(net)

    def build(self) -> TimingGraph:
        """The graph. The arcs of pins come first: the clock tree is among them."""
        add: dict[str, Any] = {
            "PIN": self._add_pin, "BUFGCTRL": self._add_buffer, "LUT": self._add_lut, "FF": self._add_register,
            "RAM": self._add_memory, "SRL": self._add_memory, "CARRY": self._add_carry, "SUM": self._add_carry,
            "MUX": self._add_wide, "RAMB18E1": self._add_block_ram, "DSP48E1": self._add_dsp,
            "PS7": self._add_processor,
        }  # fmt: skip
        for key, cell in sorted(self.cells.items(), key=lambda each: each[1].kind != "PIN"):
            if cell.kind in add:
                add[cell.kind](key, cell)
        return self.graph

    def _arc(self, target: str, source: str, delay: Delay) -> None:
        if source not in ("0", "1") and not source.startswith(OPEN):
            self.graph.arcs.setdefault(target, []).append((source, delay))

    def _check(self, name: str, net: str, delay: Delay, clock: Clock, limits: Mapping[str, int]) -> None:
        """Add a check of a net behind a delay; none where nothing is known of the pin, or its net is constant."""
        self._arc(name, net, delay)
        if name in self.graph.arcs and "setup" in limits:
            self.graph.checks.append(Check(name, name, clock, limits["setup"], limits.get("hold", 0)))

    def _clock(self, net: str, inside: Delay = NONE) -> Clock:
        """The clock at a pin: its way from the global buffer, over the regional one, and in the cell."""
        arrival, shared, region = inside, NONE, ""
        while not net.endswith(".BUFGCTRL"):
            if net not in self.graph.arcs or "@" not in net:
                raise FormatError(f"a clock must come from a global buffer, not {net}")
            source, delay = self.graph.arcs[net][0]
            arrival = arrival.after(delay)
            if "BUFHCE" in net:
                region, shared = net, delay
            net = source
        return Clock(region, arrival, shared)

    def _is_clocked(self, net: str) -> bool:
        """Whether a pin has a clock: that of a block without registers may be constant, by way of a clock's buffers."""
        while net in self.graph.arcs and not net.endswith(".BUFGCTRL"):
            net = self.graph.arcs[net][0][0]
        return net.endswith(".BUFGCTRL")

    def _add_pin(self, key: str, cell: Cell) -> None:
        """The route to a pin, behind what is between the net's cell and the pin that it leaves a site by.

        A regional clock buffer is no cell: it belongs to its pin, and so to what all clocks of its region share.
        """
        pin, source = self.netlist.pins[key]
        delay, net = self.routes.find(pin, source), cell.inputs["I"]
        kind, own = (self.netlist.fabric.sites(each.tile)[each.site]["type"] for each in (source, pin))
        if own == "BUFHCE":
            delay = delay.after(self.figures.delay("BUFH", "", "I", "O", "BUFHCE"))
        if kind.startswith("SLICE") and source.pin.endswith("MUX"):
            delay = delay.after(self._find_inside(kind, source.pin, net))
        self._arc(key, net, delay)

    def _find_inside(self, kind: str, part: str, net: str) -> Delay:
        """From a cell or a pin of a slice to another part of it, with either of two loads (AFF, AFFL)."""
        bel = _bel(net)
        source = f"carry4_{bel}".lower() if re.fullmatch(r"C?O\d", bel) else bel.lower()
        first = self.figures.delay(kind, part, source, part.lower())
        other = self.figures.find(kind, f"{part}L", source, f"{part}l".lower()) or first
        return Delay(first.least, max(first.most, other.most))

    def _add_lut(self, key: str, cell: Cell) -> None:
        kind, bel = self.netlist.find_site_type(key), _bel(key)
        for net in cell.inputs.values():
            self._arc(key, net, self.figures.delay(kind, bel, f"A{net[-1]}", f"O{bel[1]}"))

    def _add_register(self, key: str, cell: Cell) -> None:
        kind, bel = self.netlist.find_site_type(key), _bel(key)
        cells = "FF_INIT" if bel[1] == "5" else "REG_INIT_FF"
        clock = self._clock(cell.inputs["CK"], self.figures.delay(kind, bel, "clk", bel.lower()))
        self.graph.launches[key] = clock, self.figures.delay(kind, "", "CLK", "Q", cells)
        if cell.inputs["D"] not in ("0", "1"):
            wire = self._find_inside(kind, bel, cell.inputs["D"])
            limits = self.figures.check(kind, "", "DIN", "CLK", cells)
            self._check(f"{key}.D", cell.inputs["D"], wire, clock, limits)
        for pin in ("CE", "SR"):
            wire = self.figures.delay(kind, bel, pin.lower(), bel.lower())
            self._check(f"{key}.{pin}", cell.inputs[pin], wire, clock, self.figures.check(kind, "", pin, "CLK", cells))

    def _add_memory(self, key: str, cell: Cell) -> None:
        """A memory or a shift register in a LUT: it is read like a LUT, and launches what is written."""
        bel, kind = _bel(key), "SLICEM"
        output, whole = f"O{bel[1]}", f"{bel[0]}6LUT"
        cells = f"LUT_OR_MEM{bel[1]}{'LRAM' if cell.kind == 'RAM' else 'SHFREG'}"
        clock = self._clock(cell.inputs["CK"], self.figures.delay(kind, "CLKINV", "clk", "clkinv"))
        self.graph.launches[key] = clock, self.figures.delay(kind, bel, "CLK", output, cells)
        for name, net in cell.inputs.items():
            pin, wire, part = _bel(net), NONE, ""
            if "@" not in net or name == "CK":
                continue
            if name[0] == "R":
                self._arc(key, net, self.figures.delay(kind, bel, f"A{pin[-1]}", output))
                continue
            if name == "D":
                wire, part = self.figures.delay(kind, whole, pin.lower(), whole.lower()), bel
            check = {"D": "DI2" if pin.endswith("X") else "DI1", "WE": "WE"}.get(name, f"WA{pin[-1]}")
            self._check(f"{key}.{name}", net, wire, clock, self.figures.check(kind, part, check, "CLK", cells))

    def _add_carry(self, key: str, cell: Cell) -> None:
        """An output of a carry chain has a delay from each of the inputs of all bits up to its own."""
        kind, (place, _, output) = self.netlist.find_site_type(key), key.rpartition(".")
        for at in range(int(output[-1]) + 1):
            inputs = cell.inputs if at == int(output[-1]) else self.cells[f"{place}.CO{at}"].inputs
            for name, net in inputs.items():
                if net in ("0", "1") or (name == "CI" and at):
                    continue
                bel, cells, pin = _bel(net), "CARRY4", f"{name}{at}"
                if name == "DI":
                    cells = "CARRY4_O5" if bel.endswith("LUT") else f"CARRY4_{'ABCD'[at]}X"
                elif name == "CI":
                    pin = "CIN" if bel == "CIN" else "CYINIT"
                wire = self.figures.find(kind, "CARRY4", bel.lower(), "carry4") or NONE
                self._arc(key, net, self.figures.delay(kind, "", pin, output, cells).after(wire))

    def _add_wide(self, key: str, cell: Cell) -> None:
        kind, bel = self.netlist.find_site_type(key), _bel(key)
        for pin, name in (("I0", "0"), ("I1", "1"), ("S", "S0")):
            wire = self.figures.find(kind, bel, _bel(cell.inputs[pin]).lower(), bel.lower()) or NONE
            self._arc(key, cell.inputs[pin], self.figures.delay(kind, bel, name, "OUT", "SELMUX2_1").after(wire))

    def _add_buffer(self, key: str, cell: Cell) -> None:
        delay, source = self.figures.delay("BUFG", "", "I", "O", "BUFGCTRL"), self.graph.arcs.get(cell.inputs["I0"])
        if source and self.cells[key_of(source[0][0])].kind != "PS7":
            delay = delay.after(Delay(0, TRUNK_PS))
        self._arc(key, cell.inputs["I0"], delay)

    def _add_block_ram(self, key: str, cell: Cell) -> None:
        clocks = {clock: self._clock(cell.inputs[clock]) for clock in _RAM_CLOCKS
                  if self._is_clocked(cell.inputs[clock])}  # fmt: skip
        read, write = (f"RAMB18{'SDP' if cell.config[width] == 36 else 'TDP'}_U" for width in
                       ("READ_WIDTH_A", "WRITE_WIDTH_B"))  # fmt: skip
        for pin, net in cell.inputs.items():
            name = _RAM_PINS.get(pin.rstrip(_DIGITS), "")
            cells = "RAMBFIFO36E1"
            if name.startswith("DI"):
                side = "B" if "SDP" in write or name.startswith(("DIB", "DIPB")) else "A"
                cells = f"RAMBFIFO36E1RAM_MODE_{write}_WRITE_MODE_U_{_WRITE_MODES[cell.config[f'WRITE_MODE_{side}']]}"
            for clock, arrival in clocks.items():
                limits = [self.figures.check("BRAM", "", name, f"{clock}{half}", cells) for half in "UL"]
                self._check(f"{key}.{pin}", net, NONE, arrival, limits[0] or limits[1])
        for net in self.outputs[key]:
            name = _RAM_PINS[net.rpartition(":")[2].rstrip(_DIGITS)]
            side = "B" if name.startswith(("DOB", "DOPB")) else "A"
            cells = f"RAMBFIFO36E1RAM_MODE_U_{read}_DO{side}_REG_U_{cell.config[f'DO{side}_REG']}"
            for clock, arrival in clocks.items():
                if delay := self.figures.find("BRAM", "", f"{clock}U", name, cells):
                    self.graph.launches[net] = arrival, delay

    def _add_dsp(self, key: str, cell: Cell) -> None:
        parameters = {name: str(value) for name, value in cell.config.items() if name.endswith("REG")}
        parameters["USE_DPORT"] = "TRUE" if cell.config["USE_DPORT"] else "FALSE"
        parameters |= {f"{side}_INPUT": "CASCADE" if cell.config[f"{side}_INPUT"] else "DIRECT" for side in "AB"}
        adds = [cell.inputs.get(f"OPMODE{bit}") for bit in (0, 1)] == ["1", "1"]  # A:B in place of the product
        parameters["USE_MULT"] = "NONE" if adds else "MULTIPLY"
        entries = [entry for each in dsp_cells(self.figures.texts["DSP"], parameters) for entry in each.entries]
        self._add_buses(key, cell, entries)

    def _add_processor(self, key: str, cell: Cell) -> None:
        entries = [entry for each in read_cells(self.figures.texts["PS7"]) for entry in each.entries]
        self._add_buses(key, cell, entries)

    def _add_buses(self, key: str, cell: Cell, entries: list[Entry]) -> None:
        """A block whose entries are of buses: a net for each bus stands between its pins and the outputs."""
        known = {entry.source for entry in entries}
        checks: dict[tuple[str, str], list[Entry]] = defaultdict(list)
        paths: dict[str, list[Entry]] = defaultdict(list)
        for entry in entries:
            if entry.kind == "IOPATH":
                paths[entry.target].append(entry)
            else:
                checks[entry.source, entry.target].append(entry)
        clocks = {pin: self._clock(net) for pin, net in cell.inputs.items()
                  if pin.endswith("CLK") and self._is_clocked(net)}  # fmt: skip
        for pin, net in cell.inputs.items():
            bus = pin if pin in known else pin.rstrip(_DIGITS)
            self._arc(f"{key}.{bus}", net, NONE)
            for clock, arrival in clocks.items():
                self._check(f"{key}.{pin}.{clock}", net, NONE, arrival, find_limits(checks[bus, clock]))
        for net in self.outputs[key]:
            pin = net.rpartition(":")[2]
            found = paths[pin] or paths[pin.rstrip(_DIGITS)]
            for entry in found:
                if f"{key}.{entry.source}" in self.graph.arcs and not entry.source.endswith("CLK"):
                    self._arc(net, f"{key}.{entry.source}", Delay(*entry.numbers[-2:]))
            for clock, arrival in clocks.items():
                if numbers := [entry.numbers[-2:] for entry in found if entry.source == clock]:
                    least, most = (
                        choose(each) for choose, each in zip((min, max), zip(*numbers, strict=True), strict=True)
                    )
                    self.graph.launches[net] = arrival, Delay(least, most)


def _bel(net: str) -> str:
    """The cell's place in its site, or its pin."""
    return net.rpartition("@" if "@" in net else ".")[2]
