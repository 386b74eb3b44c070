"""`nearflash kv verify` of block stores: what is damaged is named, beside a writer, and nothing is written."""

import json

import numpy as np
import pytest

from nearflash.cli.main import main
from nearflash.storage.blocks import BlockStore
from nearflash.storage.blocks.block_file import BlockFile
from nearflash.storage.blocks.verify import verify_blocks

BLOCK = 4096
CAPACITY = 400_000


def put(store, numbers):
    data = [np.frombuffer(np.random.default_rng(number).bytes(BLOCK), np.uint8) for number in numbers]
    assert all(store.put([b"%d" % number for number in numbers], data))


@pytest.fixture
def path(tmp_path):
    with BlockStore(tmp_path / "tier.blocks", CAPACITY, BLOCK, "model", direct=False) as store:
        put(store, range(10))
    return tmp_path / "tier.blocks"


def place(path, key):
    """The layout, and the slot of a block."""
    with BlockFile.open_existing(path, direct=False, writable=False) as blocks:
        return blocks.layout, blocks.index.find(key)


def flip(path, offset):
    image = bytearray(path.read_bytes())
    image[offset] ^= 1
    path.write_bytes(image)


def verify(*paths):
    return main(["kv", "verify", "--buffered", *map(str, paths)])


def test_a_whole_file_is_valid_and_stays_as_it_is(path, capsys):
    before = path.read_bytes()
    assert verify(path) == 0 and capsys.readouterr().out == f"{path}: 10 blocks valid, 0 damaged\n"
    assert path.read_bytes() == before


def test_flipped_bits_in_a_block_and_in_a_record_are_named(path, capsys):
    layout, slot = place(path, b"3")
    flip(path, layout.slot_at(slot) + 7)
    other = place(path, b"5")[1]
    segment, row = divmod(other, layout.segment_slots)
    flip(path, layout.zone_at(segment) + 512 + 128 * row + 3)
    assert verify(path) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"{path}: 8 blocks valid, 2 damaged"
    assert f"DAMAGED block {b'3'.hex()}: slot {slot}, offset {layout.slot_at(slot)}" in lines
    assert f"DAMAGED record: segment {segment}, slot {other}" in lines


def test_a_damaged_header_is_named(path, capsys):
    layout, slot = place(path, b"3")
    flip(path, layout.zone_at(slot // layout.segment_slots) + 20)
    assert verify(path, "--json") == 1
    assert json.loads(capsys.readouterr().out)["damaged"]


def test_a_folder_of_stores_is_verified_file_by_file(path, tmp_path, capsys):
    with BlockStore(tmp_path / "other.blocks", CAPACITY, BLOCK, "other", direct=False) as store:
        put(store, range(3))
    (tmp_path / "notes").write_text("no store")
    assert verify(tmp_path) == 0 and [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["3", "10"]
    (tmp_path / "empty").mkdir()
    assert verify(tmp_path / "empty") == 2 and "must have a file of" in capsys.readouterr().err


def test_blocks_that_a_writer_replaces_meanwhile_are_not_damaged(path):
    with BlockStore(path, CAPACITY, BLOCK, "model", direct=False) as store:
        with BlockFile.open_existing(path, direct=False, writable=False) as blocks:
            for number in range(100, 400, 10):
                put(store, range(number, number + 10))
            found = verify_blocks(blocks)
            assert found.changed and found.damaged == []
        with BlockFile.open_existing(path, direct=False, writable=False) as blocks:
            assert verify_blocks(blocks).valid == store.stats().blocks
