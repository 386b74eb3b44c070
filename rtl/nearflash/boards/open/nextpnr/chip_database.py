"""nextpnr's chip database corrected: where a Zynq-7000's processor block is and its nets enter the fabric; delays.

For nets of hard blocks nextpnr looks from the block's pin for the first wire of a kind that routing uses, and takes
that wire's tile for the net's end: for the box that the search keeps to, and for the distance that guides it. The wires
inside the processor block have such a kind themselves, that of a tile's outputs (LOGIC_OUTS), so each net seems to end
in the middle of the block, up to 50 tiles from the column where it does; a search for one then takes seconds. Here
these wires get the kind of those between a block and the fabric, which nextpnr looks past. Names, pips and their delays
stay. For the placer, which does not look at all, the block moves (processor_place.py).

The database has delays of multiplexers and block RAM. Those of other blocks are added, a table for each type of the
netlist's cells (timing.py). nextpnr takes a cell's table where it reads the netlist, by the type there, and keeps it
when the cell's type changes. Of LUTs, flip-flops and carry chains, which nextpnr makes itself, it has stubs, and 20 ps
for every connection within a slice: they get other tables, and the connections kinds of their own (slice_timing.py).

Source: nextpnr 0.11, himbaechel/chipdb.h (the file's structures); himbaechel/uarch/xilinx/xilinx.cc,
find_source_sink_locs and is_general_routing (the search); himbaechel/arch.cc, assignArchInfo (a cell's table),
lookup_cell_delay and lookup_port_tmg_type (delays of a cell: tables in order of their numbers); himbaechel/arch.h,
getPipDelay (of a connection); common/kernel/timing.cc, get_cell_delays (a table's delays from a clock that a cell does
not have count for nothing, so that LUTs with and without memory share one).
"""

import struct
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from pathlib import Path

from nearflash.abi.errors import FormatError
from nearflash.boards.open.nextpnr import chip_file
from nearflash.boards.open.nextpnr.chip_file import ChipFile
from nearflash.boards.open.nextpnr.processor_place import move_processor
from nearflash.boards.open.nextpnr.slice_timing import SliceDelays
from nearflash.boards.open.nextpnr.timing import BlockDelays, block_of

__all__ = ["correct"]

_MAGIC, _VERSION = 0x00CA7CA7, 6
# Bytes of the structures of delays, and offsets in them.
_GRADE_BYTES, _GRADE_PIPS, _GRADE_CELLS = 28, 4, 20
_CELL_BYTES, _CELL_PINS = 12, 4
_PIN_BYTES, _PIN_PATHS, _PIN_EDGES = 24, 8, 16
_PIP_CLASS_BYTES, _PIP_CLASS_FLAGS, _UNBUFFERED = 52, 48, 1
#: Wires by tile whose kinds stand for all of their kind: outputs of a block's pins and of a tile; between both.
_OUTPUT, _OUTBOUND = ("PSS2", "PS7_FCLKCLK0"), ("INT_L", "LOGIC_OUTS_L0")
_BETWEEN = ("INT_INTERFACE_L", "INT_INTERFACE_BLOCK_OUTS_L_B0")
_PROCESSOR = "PSS"
"""What names of the processor block's tiles begin with."""


def correct(
    source: Path,
    path: Path,
    delays: Mapping[str, BlockDelays],
    pins: Collection[str] = (),
    slices: SliceDelays | None = None,
) -> int:
    """Write the chip database `source` to `path` with the processor block's wires corrected; returns how many were.

    delays: of blocks that the database has none of, to add, by the type of the netlist's cells (`DSP48E1_0`). A device
    may lack a block.
    pins: of the processor block, in use: it moves to them.
    slices: delays of slices in place of the database's.
    A device without a processor block has no wires to correct.
    Raises FormatError for a file of another version, or one in which the kinds cannot be told.
    """
    database = ChipFile(bytearray(source.read_bytes()))
    try:
        found = database.number(database.chip), database.number(database.chip + 4)
        if found != (_MAGIC, _VERSION):
            raise FormatError(f"{source} must be a chip database of version {_VERSION}, not {found[0]:#x}, {found[1]}")
        changed = _correct_processor(database, source)
        _add_delays(database, delays)
        _set_slice_delays(database, slices or SliceDelays())
        move_processor(database, pins)
    except FormatError:
        raise
    except (struct.error, IndexError, ValueError) as error:
        raise FormatError(f"{source} must be a chip database of version {_VERSION}: {error}") from error
    path.write_bytes(database.content)
    return changed


def _wires(file: ChipFile) -> Iterator[tuple[str, str, int]]:
    """Tile, name and offset of the kind of every wire."""
    for tile in file.array(file.chip + chip_file.CHIP_TILES, chip_file.TILE_BYTES):
        kind = file.name(file.number(tile))
        for wire in file.array(tile + chip_file.TILE_WIRES, chip_file.WIRE_BYTES):
            yield kind, file.name(file.number(wire)), wire + chip_file.WIRE_KIND


def _block_pins(file: ChipFile, kinds: Collection[str]) -> tuple[dict[str, int], set[int]]:
    """Numbers of the pins of kinds of block (`DSP48E1`), and those of their types; none where the device has none.

    Names of pins are those of the wires at them, in the block's site: nextpnr's own names are not in the file. At a
    pin whose signal can be inverted it is the wire behind the inverter.
    """
    pins, types = {}, set()
    for tile in file.array(file.chip + chip_file.CHIP_TILES, chip_file.TILE_BYTES):
        for bel in file.array(tile + chip_file.TILE_BELS, chip_file.BEL_BYTES):
            if file.name(file.number(bel)).rpartition(".")[2] in kinds:
                types.add(file.number(bel + chip_file.BEL_TYPE))
                wires = file.array(tile + chip_file.TILE_WIRES, chip_file.WIRE_BYTES)
                for pin in file.array(bel + chip_file.BEL_PINS, chip_file.PIN_BYTES):
                    wire = file.name(file.number(wires[file.number(pin + chip_file.PIN_WIRE)]))
                    pins[wire.rpartition(".")[2].removesuffix("INV_OUT")] = file.number(pin)
    return pins, types


def _correct_processor(database: ChipFile, source: Path) -> int:
    wires = list(_wires(database))
    kinds = {(tile, name): database.number(offset) for tile, name, offset in wires}
    changed = 0
    if any(tile.startswith(_PROCESSOR) for tile, _, _ in wires):
        if missing := [where for where in (_OUTPUT, _OUTBOUND, _BETWEEN) if where not in kinds]:
            tile, name = missing[0]
            raise FormatError(f"{source} must be a chip database with the wire {name} of {tile}, whose kind is known")
        outputs = {kinds[_OUTPUT], kinds[_OUTBOUND]}
        for tile, _, offset in wires:
            if tile.startswith(_PROCESSOR) and database.number(offset) in outputs:
                database.put(offset, kinds[_BETWEEN])
                changed += 1
    return changed


def _add_delays(database: ChipFile, delays: Mapping[str, BlockDelays]) -> None:
    """Add a table to each speed grade for each type of the netlist's cells."""
    pins = {block: _block_pins(database, {block})[0] for block in set(map(block_of, delays))}
    timed = [name for name in delays if pins[block_of(name)]]
    if not timed:
        return
    numbers = database.add_names(timed)
    for grade in database.array(database.chip + chip_file.CHIP_GRADES, _GRADE_BYTES):
        room = database.extend(grade + _GRADE_CELLS, _CELL_BYTES, (_CELL_PINS,), len(timed))
        for cell, name, number in zip(room, timed, numbers, strict=True):
            database.put(cell, number)
            database.point(cell + _CELL_PINS, *_append_pins(database, delays[name], pins[block_of(name)]))


def _set_slice_delays(database: ChipFile, slices: SliceDelays) -> None:
    """Give the slices' cells other tables, and the connections within slices kinds of their own."""
    for blocks, table in slices.tables.items():
        pins, types = _block_pins(database, blocks)
        for grade in database.array(database.chip + chip_file.CHIP_GRADES, _GRADE_BYTES):
            for cell in database.array(grade + _GRADE_CELLS, _CELL_BYTES):
                if database.number(cell) in types:
                    database.point(cell + _CELL_PINS, *_append_pins(database, table, pins))
    delays = dict(_slice_pips(database, slices))
    kinds = sorted(set(delays.values()))
    numbers: dict[int, int] = {}
    for grade in database.array(database.chip + chip_file.CHIP_GRADES, _GRADE_BYTES) if kinds else ():
        first = len(database.array(grade + _GRADE_PIPS, _PIP_CLASS_BYTES))
        numbers = {delay: first + at for at, delay in enumerate(kinds)}
        for kind, delay in zip(
            database.extend(grade + _GRADE_PIPS, _PIP_CLASS_BYTES, (), len(kinds)), kinds, strict=True
        ):
            database.put(kind, *[delay] * 4)
            database.put(kind + _PIP_CLASS_FLAGS, _UNBUFFERED)
    for pip, delay in delays.items():
        database.put(pip + chip_file.PIP_TIMING, numbers[delay])


def _slice_pips(database: ChipFile, slices: SliceDelays) -> Iterator[tuple[int, int]]:
    """Offset and delay, ps, of each connection within slices, their pins included, whose delay is known."""
    for tile in database.array(database.chip + chip_file.CHIP_TILES, chip_file.TILE_BYTES):
        names = [database.name(database.number(wire))
                 for wire in database.array(tile + chip_file.TILE_WIRES, chip_file.WIRE_BYTES)]  # fmt: skip
        if slices.pins.keys().isdisjoint(names):
            continue
        for pip in database.array(tile + chip_file.TILE_PIPS, chip_file.PIP_BYTES):
            source, target = (names[database.number(pip + at)] for at in (chip_file.PIP_SOURCE, chip_file.PIP_TARGET))
            ends = source.rpartition(".")[2], target.rpartition(".")[2]
            if source in slices.pins:  # into the LUT, or through it to the tile's wire at its output
                yield pip, slices.pins[source] + (0 if "." in target else slices.through)
            elif "." in source and "." in target and ends in slices.inside:
                yield pip, slices.inside[ends]
            elif ("." in source) != ("." in target):
                yield pip, 0


def _append_pins(database: ChipFile, delays: BlockDelays, pins: Mapping[str, int]) -> tuple[int, int]:
    """Append a block's table: its pins in order, each with its delays; returns where, and how many pins."""
    named: dict[str, set[int]] = defaultdict(set)
    for name, number in pins.items():
        named[name].add(number)
        named[name.rstrip("0123456789")].add(number)
    paths: dict[int, dict[int, int]] = defaultdict(dict)  # of an output, by input
    edges: dict[int, dict[int, tuple[int, int]]] = defaultdict(dict)  # setup and launch, by clock
    for (source, target), delay in delays.paths.items():
        for number in named[target]:
            paths[number] |= dict.fromkeys(named[source], delay)
    for (pin, clock), setup in delays.setups.items():
        for number in named[pin]:
            edges[number] |= dict.fromkeys(named[clock], (setup, 0))
    for (clock, pin), launch in delays.launches.items():
        for number in named[pin]:
            edges[number] |= dict.fromkeys(named[clock], (0, launch))
    clocks = {number for each in edges.values() for number in each}
    timed = sorted(paths.keys() | edges.keys() | clocks)
    first = database.append_bytes(bytes(_PIN_BYTES * len(timed)))
    for at, number in enumerate(timed):
        pin_at = first + _PIN_BYTES * at
        database.put(pin_at, number, number in clocks)
        arcs = [(source, *[delay] * 4) for source, delay in sorted(paths[number].items())]
        database.point(pin_at + _PIN_PATHS, database.append(*chain.from_iterable(arcs)), len(arcs))
        # Of a clock: its edge (0: rising); setup, hold, clock to output, each fast and slow, least and most.
        checks = [(clock, 0, *[setup] * 4, *[0] * 4, *[launch] * 4)
                  for clock, (setup, launch) in sorted(edges[number].items())]  # fmt: skip
        database.point(pin_at + _PIN_EDGES, database.append(*chain.from_iterable(checks)), len(checks))
    return first, len(timed)
