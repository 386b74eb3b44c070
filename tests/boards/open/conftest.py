"""A small database in prjxray's formats, of a part with four tiles."""

import json
import struct
from pathlib import Path

import pytest

from nearflash.boards.open.database import PartDatabase


def block(address, frames, offset, words=2, **alias):
    return {"baseaddr": f"{address:#010x}", "frames": frames, "offset": offset, "words": words, **alias}


ALIAS = {"type": "IOB", "start_offset": 2, "sites": {"IOB33_Y0": "IOB33_Y1"}}
TILES = {
    "CLB_X0Y0": {"type": "CLB", "bits": {"CLB_IO_CLK": block(0x100, 4, 0)}},
    "CLB_X0Y1": {"type": "CLB", "bits": {"CLB_IO_CLK": block(0x100, 4, 2)}},
    "BRAM_X1Y0": {"type": "BRAM", "bits": {"CLB_IO_CLK": block(0x200, 2, 0), "BLOCK_RAM": block(0x800000, 3, 5, 10)}},
    "IOB_SING_X2Y0": {"type": "IOB_SING", "bits": {"CLB_IO_CLK": block(0x300, 2, 99, alias=ALIAS)}},
    "NULL_X3Y0": {"type": "NULL"},
}
FILES = {
    "mapping/parts.yaml": 'desk7clg1-1:\n  device: desk7\n  package: clg1\n"desk8":\n  device: desk8\n',
    "mapping/devices.yaml": '# device to fabric\n"desk7":\n  fabric: "fabric7"\n',
    "fabric7/tilegrid.json": json.dumps(TILES),
    "fabric7/tileconn.json": "[]",
    "desk7clg1-1/part.yaml": "part\n",
    "desk7clg1-1/required_features.fasm": "CLB_X0Y1.ALWAYS_ON\n",
    "segbits_clb.db": "CLB.AFF.ZINI 03_06\nCLB.AFF.ZRST 03_06 !01_33\nCLB.LUT.INIT[00] 02_00\nCLB.LUT.INIT[01] 02_01\n"
                      "CLB.MUX.A 00_05 !00_07\nCLB.MUX.B !00_05 00_07\nCLB.ALWAYS_ON 00_00\nCLB.ONE 00_63\n\n",
    "segbits_bram.db": "BRAM.RAMB18_Y0.IN_USE 01_00\n",
    "segbits_bram.block_ram.db": "BRAM.RAMB18_Y0.INIT_00[000] 00_00\nBRAM.RAMB18_Y0.INIT_00[255] 02_319\n",
    "segbits_iob.db": "IOB.IOB33_Y1.PULLUP 01_64\nIOB.IOB33_Y0.PULLUP 01_65\n",
    "tile_type_CLBL.json": json.dumps({"sites": [
        {"site_pins": {"A1": {"delay": ["0.180", "0.225", "0.428", "0.531"], "wire": "CLBL_M_A1"}, "D6": None}},
        {"site_pins": {"AX": {"delay": ["0.1", "0.1", "0.1", "0.1"], "wire": "CLBL_L_AX"}}}]}),
    "tile_type_CLBR.json": json.dumps({"sites": [
        {"site_pins": {"A1": {"delay": ["0.180", "0.225", "0.428", "0.529"], "wire": "CLBL_M_A1"}}}]}),
    "ppips_clb.db": "CLB.CLB_IMUX0.CLB_A1 always\n",
}  # fmt: skip


@pytest.fixture
def database(tmp_path: Path) -> PartDatabase:
    """The database of the part desk7clg1-1, in the folder `database`."""
    for name, text in FILES.items():
        path = tmp_path / "database" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return PartDatabase(tmp_path / "database", "desk7clg1-1")


_BUILT_IN = 100
"""Of names in a chip database, those that nextpnr has itself."""


def _chip_file(tiles, version=6, magic=0xCA7CA7, blocks=None, kinds=(), pips=None):
    blocks, pips = blocks or {}, pips or {}
    tiles = tiles | {tile: tiles.get(tile, {}) | {wire: 0 for _, pins in bels.values() for wire in pins}
                     for tile, bels in blocks.items()}  # fmt: skip
    names = [
        *tiles,
        *(name for wires in tiles.values() for name in wires),
        *(bel for bels in blocks.values() for bel in bels),
    ]
    chip = 4
    text = bytearray(chip + 84)

    def put(offset, *values):
        struct.pack_into(f"<{len(values)}i", text, offset, *values)

    def array(offset, items, item_bytes):
        """Room for an array at the end, which the pointer at an offset then points to; where each item is."""
        first = len(text)
        text.extend(bytes(items * item_bytes))
        put(offset, first - offset, items)
        return range(first, first + items * item_bytes, item_bytes)

    put(0, chip)
    put(chip, magic, version)
    places = array(chip + 28, len(tiles), 40)
    for place, (tile, wires) in zip(places, tiles.items(), strict=True):
        put(place, _BUILT_IN + names.index(tile))
        for wire, (name, kind) in zip(array(place + 12, len(wires), 48), wires.items(), strict=True):
            put(wire, _BUILT_IN + names.index(name), kind)
        for pip, ends in zip(array(place + 20, len(pips.get(tile, ())), 24), pips.get(tile, ()), strict=True):
            put(pip, *map(list(wires).index, ends))
        bels = blocks.get(tile, {})
        for bel, (name, (kind, pins)) in zip(array(place + 4, len(bels), 36), bels.items(), strict=True):
            put(bel, _BUILT_IN + names.index(name), kind)
            for pin, (wire, number) in zip(array(bel + 24, len(pins), 12), pins.items(), strict=True):
                put(pin, number, list(wires).index(wire))
    for grade in array(chip + 68, 1 if kinds else 0, 28):
        array(grade + 4, 1, 52)
        for cell, kind in zip(array(grade + 20, len(kinds), 12), kinds, strict=True):
            put(cell, kind)
            for pin in array(cell + 4, 1, 24):
                put(pin, 1)
                for edge in array(pin + 16, 1, 56):
                    put(edge, 40, 0, *[kind] * 12)
    ids = len(text)
    text.extend(bytes(12))
    put(chip + 76, ids - chip - 76)
    put(ids, _BUILT_IN)
    for pointer, name in zip(array(ids + 4, len(names), 4), names, strict=True):
        put(pointer, len(text) - pointer)
        text += name.encode() + b"\0"
    return bytes(text)


@pytest.fixture
def chip_file():
    """Bytes of a chip database for nextpnr with the tiles given, {tile: {wire: kind}}.

    blocks: {tile: {block: (kind, {wire: number of the pin at it})}}. kinds: of cells with delays of one pin.
    pips: {tile: [(source wire, target wire)]}, all of the one kind of delay.
    """
    return _chip_file
