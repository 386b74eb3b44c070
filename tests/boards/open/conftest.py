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
    "BRAM_X1Y0": {"type": "BRAM", "bits": {"CLB_IO_CLK": block(0x200, 2, 0), "BLOCK_RAM": block(0x800000, 3, 5)}},
    "IOB_SING_X2Y0": {"type": "IOB_SING", "bits": {"CLB_IO_CLK": block(0x300, 2, 99, alias=ALIAS)}},
    "NULL_X3Y0": {"type": "NULL"},
}
FILES = {
    "mapping/parts.yaml": 'desk7clg1-1:\n  device: desk7\n  package: clg1\n"desk8":\n  device: desk8\n',
    "mapping/devices.yaml": '# device to fabric\n"desk7":\n  fabric: "fabric7"\n',
    "fabric7/tilegrid.json": json.dumps(TILES),
    "desk7clg1-1/part.yaml": "part\n",
    "desk7clg1-1/required_features.fasm": "CLB_X0Y1.ALWAYS_ON\n",
    "segbits_clb.db": "CLB.AFF.ZINI 03_06\nCLB.AFF.ZRST 03_06 !01_33\nCLB.LUT.INIT[00] 02_00\nCLB.LUT.INIT[01] 02_01\n"
                      "CLB.MUX.A 00_05 !00_07\nCLB.MUX.B !00_05 00_07\nCLB.ALWAYS_ON 00_00\nCLB.ONE 00_63\n\n",
    "segbits_bram.db": "BRAM.RAMB18_Y0.IN_USE 01_00\n",
    "segbits_bram.block_ram.db": "BRAM.RAMB18_Y0.INIT_00[000] 00_00\nBRAM.RAMB18_Y0.INIT_00[255] 02_319\n",
    "segbits_iob.db": "IOB.IOB33_Y1.PULLUP 01_64\nIOB.IOB33_Y0.PULLUP 01_65\n",
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


def _chip_file(tiles, version=6, magic=0xCA7CA7):
    names = [*tiles, *(name for wires in tiles.values() for name in wires)]
    chip, tile_at = 4, 4 + 84
    wire_at = tile_at + 40 * len(tiles)
    wires = [(name, kind) for each in tiles.values() for name, kind in each.items()]
    ids_at = wire_at + 48 * len(wires)
    pointers_at = ids_at + 12
    text = bytearray(pointers_at + 4 * len(names))

    def put(offset, *values):
        struct.pack_into(f"<{len(values)}i", text, offset, *values)

    put(0, chip)
    put(chip, magic, version)
    put(chip + 28, tile_at - chip - 28, len(tiles))
    put(chip + 76, ids_at - chip - 76)
    put(ids_at, _BUILT_IN, pointers_at - ids_at - 4, len(names))
    for index, name in enumerate(names):
        put(pointers_at + 4 * index, len(text) - pointers_at - 4 * index)
        text += name.encode() + b"\0"
    place = wire_at
    for index, (tile, own) in enumerate(tiles.items()):
        at = tile_at + 40 * index
        put(at, _BUILT_IN + names.index(tile))
        put(at + 12, place - at - 12, len(own))
        place += 48 * len(own)
    for index, (name, kind) in enumerate(wires):
        put(wire_at + 48 * index, _BUILT_IN + names.index(name), kind)
    return bytes(text)


@pytest.fixture
def chip_file():
    """Bytes of a chip database for nextpnr with the tiles given, {tile: {wire: kind}}; nothing else is in it."""
    return _chip_file
