"""Files of blocks that were damaged: flipped bits, and pages where others belong, are misses and nothing else."""

import numpy as np
import pytest

from nearflash.storage.blocks.block_file import BlockFile, create_file
from nearflash.storage.blocks.layout import BlockLabel, BlockLayout
from nearflash.storage.blocks.transfer import BlockTransfer

LAYOUT = BlockLayout(4096, segment_slots=8, segments=6)
KEYS = [bytes([number]) * 36 for number in range(40)]


def data(key):
    return np.frombuffer(np.random.default_rng(list(key)).bytes(4096), np.uint8)


def make(path, keys=KEYS, salt=1):
    create_file(path, BlockLabel(LAYOUT, "model", salt), direct=False)
    with BlockFile.open_existing(path, direct=False, threads=0) as blocks:
        for start in range(0, len(keys), 8):
            part = keys[start : start + 8]
            blocks.write([(BlockTransfer(1), 0, key, data(key)) for key in part])


def served(path):
    """Keys of which what was put is served; nothing else may be."""
    with BlockFile.open_existing(path, direct=False, threads=0) as blocks:
        good = []
        for key in KEYS:
            transfer, target = BlockTransfer(1), np.zeros(4096, np.uint8)
            blocks.submit_read(transfer, [(0, key, target)])
            if transfer.result() == [True]:
                assert (target == data(key)).all()
                good.append(key)
            else:
                assert not target.any()
        return good


@pytest.fixture
def path(tmp_path):
    make(tmp_path / "blocks")
    return tmp_path / "blocks"


def test_flipped_bits_are_misses_of_few_blocks(path):
    whole, before, rng = path.read_bytes(), served(path), np.random.default_rng(0)
    assert len(before) > 20
    for _ in range(60):
        image = bytearray(whole)
        image[int(rng.integers(4096, len(image)))] ^= 1 << int(rng.integers(8))
        path.write_bytes(image)
        after = served(path)
        assert set(after) <= set(before) and len(before) - len(after) <= LAYOUT.segment_slots


def test_pages_of_other_places_are_misses(path):
    whole, before, rng = path.read_bytes(), set(served(path)), np.random.default_rng(0)
    pages = np.frombuffer(whole, np.uint8).reshape(-1, 4096)
    for _ in range(60):
        image = pages.copy()
        one, other = rng.integers(1, len(pages), 2)
        image[one] = pages[other]
        path.write_bytes(image.tobytes())
        assert set(served(path)) <= before


def test_a_segment_in_the_place_of_another_is_misses(path):
    whole, before = path.read_bytes(), set(served(path))
    size, first = LAYOUT.segment_bytes, LAYOUT.zone_at(1)
    path.write_bytes(whole[:first] + whole[first + size : first + 2 * size] + whole[first + size :])
    assert set(served(path)) < before


def test_pages_of_another_file_of_the_same_model_are_misses(path, tmp_path):
    make(tmp_path / "other", KEYS[::-1], salt=2)
    path.write_bytes(path.read_bytes()[:4096] + (tmp_path / "other").read_bytes()[4096:])
    assert served(path) == []


def test_blocks_of_an_older_generation_do_not_come_back(path):
    """Of a segment the header that erased it has reached the drive, and nothing else of its zone."""
    before = path.read_bytes()
    with BlockFile.open_existing(path, direct=False, threads=0) as blocks:
        old = {key for segment in range(6) for key in map(blocks.index.key, blocks.index.blocks_of(segment))}
        for number in range(6):
            blocks.write([(BlockTransfer(1), 0, bytes([100 + number, row]), data(b"new")) for row in range(8)])
    for segment in range(6):
        image, at = bytearray(path.read_bytes()), LAYOUT.zone_at(segment)
        image[at + 512 : at + LAYOUT.segment_bytes] = before[at + 512 : at + LAYOUT.segment_bytes]
        path.write_bytes(image)
    assert old and served(path) == []
