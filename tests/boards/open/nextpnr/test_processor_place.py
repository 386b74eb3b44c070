"""The processor block is where its pins in use are, on a chip of six tiles."""

import struct

import pytest

from nearflash.abi.errors import FormatError
from nearflash.boards.open.nextpnr.chip_file import ChipFile
from nearflash.boards.open.nextpnr.processor_place import move_processor, processor_pins

#: Of a kind of tile: its wires, and pips between them. The site's wires come last and are of no node.
KINDS = {
    "PSS2": (["DATA", "READY", "SAXI.SAXIDATA0", "SAXI.SAXIREADY", "SAXI.PSCLK"],
             [("SAXI.SAXIDATA0", "DATA"), ("READY", "SAXI.SAXIREADY")]),
    "INT_L": (["LOGIC_OUTS0", "IMUX0"], []),
    "NULL": (["NULL"], []),
    "CLB": (["CLK", "A1"], []),
}  # fmt: skip
GRID = [["PSS2", "NULL", "CLB"], ["NULL", "NULL", "INT_L"]]
NODES = [[((0, 0), "DATA"), ((2, 1), "LOGIC_OUTS0")], [((0, 0), "READY"), ((2, 1), "IMUX0")]]
PINS = {"SAXI.SAXIDATA0": (700, 1), "SAXI.SAXIREADY": (701, 0), "SAXI.PSCLK": (702, 2)}
"""Of each pin's wire: the pin's number, and its way."""
BLOCK = "PS7_X0Y0.PS7"
BLOCKS = {"PSS2": BLOCK, "CLB": "SLICE_X0Y0.A6LUT"}
OWN_NAMES = 1000


class Writer:
    """A file of numbers, pointers and arrays."""

    def __init__(self):
        self.content, self.names = bytearray(88), []

    def name(self, text):
        if text not in self.names:
            self.names.append(text)
        return OWN_NAMES + self.names.index(text)

    def put(self, offset, *numbers):
        struct.pack_into(f"<{len(numbers)}i", self.content, offset, *numbers)

    def array(self, offset, items, item_bytes):
        self.content += bytes(-len(self.content) % 4)
        first = len(self.content)
        self.content += bytes(items * item_bytes)
        self.put(offset, first - offset, items)
        return range(first, first + items * item_bytes, item_bytes)


def chip(grid=GRID):
    """The chip of the tables above, as nextpnr's database."""
    made, kinds = Writer(), list(KINDS)
    made.put(0, 4)
    made.put(12, len(GRID[0]), len(GRID))
    for tile, (name, (wires, pips)) in zip(made.array(32, len(KINDS), 40), KINDS.items(), strict=True):
        made.put(tile, made.name(name))
        for index, wire in enumerate(made.array(tile + 12, len(wires), 48)):
            made.put(wire, made.name(wires[index]), 11, -1, 0, 130)
            for side, end in ((24, 1), (32, 0)):
                mine = [number for number, pip in enumerate(pips) if pip[end] == wires[index]]
                for item, number in zip(made.array(wire + side, len(mine), 4), mine, strict=True):
                    made.put(item, number)
            at_pin = name == "PSS2" and wires[index] in PINS
            for item in made.array(wire + 40, int(at_pin), 8):
                made.put(item, 0, PINS[wires[index]][0])
        for item, pip in zip(made.array(tile + 20, len(pips), 24), pips, strict=True):
            made.put(item, *map(wires.index, pip))
        for bel in made.array(tile + 4, int(name in BLOCKS), 36):
            made.put(bel, made.name(BLOCKS[name]), 247)
            pins = PINS if name == "PSS2" else {}
            for pin, (wire, (number, way)) in zip(made.array(bel + 24, len(pins), 12), pins.items(), strict=True):
                made.put(pin, number, wires.index(wire), way)
    for at, place in enumerate(made.array(40, 6, 16)):
        made.put(place, 0, kinds.index(grid[at // 3][at % 3]), at)
    for node, ends in zip(made.array(48, len(NODES), 12), NODES, strict=True):
        (x, y), _ = ends[0]
        for item, ((to_x, to_y), wire) in zip(made.array(node, 2, 6), ends, strict=True):
            struct.pack_into("<hhH", made.content, item, to_x - x, to_y - y, index_of((to_x, to_y), wire))
    for at, routing in enumerate(made.array(56, 6, 12)):
        place = at % 3, at // 3
        made.put(routing + 8, 9)
        known = [wire for wire in KINDS[grid[place[1]][place[0]]][0] if "." not in wire]
        for item, wire in zip(made.array(routing, len(known), 6), known, strict=True):
            struct.pack_into("<hhH", made.content, item, *node_of(place, wire))
    ids = len(made.content)
    made.content += bytes(12)
    made.put(80, ids - 80)
    made.put(ids, OWN_NAMES)
    for pointer, name in zip(made.array(ids + 4, len(made.names), 4), made.names, strict=True):
        made.put(pointer, len(made.content) - pointer)
        made.content += name.encode() + b"\0"
    return made.content


def index_of(place, wire):
    return KINDS[GRID[place[1]][place[0]]][0].index(wire)


def node_of(place, wire):
    for number, ends in enumerate(NODES):
        if (place, wire) == ends[0]:
            return 0x7001, number, 0
        if (place, wire) in ends:
            (x, y), first = ends[0]
            return x - place[0], y - place[1], index_of((x, y), first)
    return 0x7000, 0, 0


class Reader:
    """A chip database as nextpnr reads it."""

    def __init__(self, content):
        self.file = ChipFile(content)
        self.tiles, self.places = self.file.array(32, 40), self.file.array(40, 16)
        self.nodes, self.routings = self.file.array(48, 12), self.file.array(56, 12)

    def tile(self, x, y):
        return self.tiles[self.file.number(self.places[3 * y + x] + 4)]

    def wires(self, x, y):
        return self.file.array(self.tile(x, y) + 12, 48)

    def bels(self, x, y):
        return self.file.array(self.tile(x, y) + 4, 36)

    def node(self, x, y, wire):
        """Places, names and pins of the wires that are one node with a wire."""
        mark, dy, first = self.mark(x, y, wire)
        if mark == 0x7000:
            return [self.described(x, y, wire)]
        if mark != 0x7001:
            x, y, wire = x + mark, y + dy, first
            mark, dy, first = self.mark(x, y, wire)
            assert mark == 0x7001
        ends = [struct.unpack_from("<hhH", self.file.content, item) for item in self.file.array(self.nodes[dy], 6)]
        return [self.described(x + dx, y + dy, index) for dx, dy, index in ends]

    def mark(self, x, y, wire):
        known = self.file.array(self.routings[self.file.number(self.places[3 * y + x] + 8)], 6)
        return struct.unpack_from("<hhH", self.file.content, known[wire]) if wire < len(known) else (0x7000, 0, 0)

    def described(self, x, y, wire):
        offset = self.wires(x, y)[wire]
        pins = [(self.file.number(pin), self.file.number(pin + 4)) for pin in self.file.array(offset + 40, 8)]
        return (x, y), self.file.name(self.file.number(offset)), pins


def test_the_block_moves_to_the_empty_tile_nearest_to_its_pins_in_use():
    # Regression: logic at HP0 was placed some 60 tiles away from its pins, and update's bitstream had 98.0 MHz.
    file = ChipFile(chip())
    assert move_processor(file, {"SAXIDATA0", "SAXIREADY"}) == (1, 1)
    chip_now = Reader(file.content)
    assert not chip_now.bels(0, 0) and not chip_now.bels(0, 1), "in one place, and other empty tiles stay empty"
    (bel,) = chip_now.bels(1, 1)
    assert (file.name(file.number(bel)), file.number(bel + 4)) == (BLOCK, 247)
    pins = [(file.number(pin), file.number(pin + 4), file.number(pin + 8)) for pin in file.array(bel + 24, 12)]
    assert [(number, way) for number, _, way in pins] == list(PINS.values())
    for (number, wire, _), name in zip(pins, PINS, strict=True):
        node = chip_now.node(1, 1, wire)
        assert node == [((0, 0), name, []), ((1, 1), name, [(0, number)])]
        assert node == chip_now.node(0, 0, KINDS["PSS2"][0].index(name))
    assert all(file.number(wire + 16) == 130 for wire in chip_now.wires(1, 1))


def test_other_wires_and_pips_stay():
    file, before = ChipFile(chip()), Reader(chip())
    move_processor(file, {"SAXIREADY"})
    after = Reader(file.content)
    for x, y, wire in [(0, 0, 0), (0, 0, 1), (2, 1, 0), (2, 1, 1), (2, 0, 0), (2, 0, 1), (0, 1, 0), (1, 0, 0)]:
        assert after.node(x, y, wire) == before.node(x, y, wire)

    def pips(chip):
        file = chip.file
        return [(file.number(pip), file.number(pip + 4)) for pip in file.array(chip.tile(0, 0) + 20, 24)]

    assert pips(after) == pips(before) == [(2, 0), (1, 3)]


def test_logic_behind_the_pins_is_left_out():
    # Regression: attend's cells were spread over the block, then put into the columns before it, and did not route.
    file = ChipFile(chip([["PSS2", "NULL", "CLB"], ["CLB", "CLB", "INT_L"]]))
    assert move_processor(file, {"SAXIDATA0"}) == (1, 0)
    chip_now = Reader(file.content)
    assert not chip_now.bels(0, 1) and not chip_now.bels(1, 1) and len(chip_now.bels(1, 0)) == 1
    (block,) = chip_now.bels(2, 0)
    assert file.name(file.number(block)) == BLOCKS["CLB"], "in the column of the pins it stays"
    assert [file.name(file.number(wire)) for wire in chip_now.wires(0, 1)] == KINDS["CLB"][0]


@pytest.mark.parametrize("pins", [set(), {"PSCLK"}, {"NOSUCH"}], ids=["none", "of no fabric", "unknown"])
def test_a_block_whose_pins_reach_no_fabric_stays(pins):
    file = ChipFile(chip())
    assert move_processor(file, pins) is None
    assert file.content == chip()


def test_a_pin_whose_wire_is_of_a_node_is_an_error():
    file = ChipFile(chip())
    routing = Reader(file.content).routings[0]
    known = [*file.array(routing, 6)]
    marks = [struct.unpack_from("<hhH", file.content, item) for item in known] + [(0x7001, 0, 0)] * 3
    made = file.append_bytes(b"".join(struct.pack("<hhH", *mark) for mark in marks))
    file.point(routing, made, len(marks))
    with pytest.raises(FormatError, match="wires at pins of PS7 must be of no node in a chip database of this version"):
        move_processor(file, {"SAXIDATA0"})


def test_pins_in_use_are_those_that_another_cell_drives_or_reads():
    cells = {
        "ps": {"type": "PS7", "connections": {"SAXIDATA": [5, 6, "0"], "SAXIREADY": [7], "FCLKCLK": [8, 9]}},
        "a": {"type": "LUT2", "connections": {"I0": [7], "I1": ["1"], "O": [6]}},
        "b": {"type": "BUFG", "connections": {"I": [8], "O": [10]}},
    }
    assert processor_pins(cells) == {"SAXIDATA1", "SAXIREADY", "FCLKCLK0"}
    assert processor_pins({"a": cells["a"]}) == set()
