"""Blocks: which is taken, which is emptied, when there is no room."""

import numpy as np
import pytest

from nearflash.abi.attention.codeword import PageKind
from nearflash.abi.errors import StorageFullError
from nearflash.storage.flash.geometry import FlashGeometry
from nearflash.storage.flash.page import page_keys
from nearflash.storage.kv.space import BlockSpace

SIZE = 4


@pytest.fixture
def space():
    """Two LUN queues of five blocks of four pages."""
    return BlockSpace(FlashGeometry(4096, SIZE, 2, 1, 10))


def fill(space, kind, queue, count):
    pages = space.take(kind, queue, count)
    space.own(pages, page_keys(1, 0, 0, np.arange(count), kind))
    return pages


def need(tokens=(0, 0), index=(0, 0)):
    return np.array([tokens, index])


def test_kinds_and_lanes_have_blocks_of_their_own(space):
    tokens, index, other = (fill(space, PageKind(kind), queue, 5) for kind, queue in ((0, 0), (1, 0), (0, 1)))
    blocks = [set((pages // SIZE).tolist()) for pages in (tokens, index, other)]
    assert blocks == [{0, 2}, {4, 6}, {1, 3}]
    assert [space.kind(block) for block in (0, 4, 1)] == [PageKind.TOKEN, PageKind.INDEX, PageKind.TOKEN]
    assert fill(space, PageKind.TOKEN, 0, 1)[0] == tokens[-1] + 1
    assert space.live_pages == 16


def test_the_victim_has_fewest_live_pages_and_of_equals_least_wear(space):
    pages = fill(space, PageKind.TOKEN, 0, 12)
    space.release(pages[[0, 4, 5, 8, 9]])
    space.erases[[2, 4]] = 7, 3
    assert space.victim(0) == 4
    space.erases[4] = 8
    assert space.victim(0) == 2
    space.release(pages[[1, 2]])
    assert space.victim(0) == 0
    assert space.pages_of(2).tolist() == [10, 11]


def test_the_least_worn_free_block_is_taken_first(space):
    space.erases[[0, 2, 4, 6, 8]] = 3, 2, 1, 2, 5
    assert [int(fill(space, PageKind.TOKEN, 0, SIZE)[0]) // SIZE for _ in range(5)] == [4, 2, 6, 0, 8]


def test_room_for_what_fits_all_blocks_but_one(space):
    space.check(need(tokens=(16, 0)))
    space.check(need(tokens=(9, 16), index=(4, 0)))
    for full in (need(tokens=(17, 0)), need(tokens=(9, 0), index=(5, 0)), need(index=(0, 17))):
        with pytest.raises(StorageFullError, match=r"lun 0 of channel [01] has 4 blocks of 4 pages, of which 0 are"):
            space.check(full)
    pages = fill(space, PageKind.TOKEN, 0, 13)
    with pytest.raises(StorageFullError, match="of which 13 are in use"):
        space.check(need(index=(1, 0)))
    assert space.lacking(need(tokens=(3, 0))) is None
    assert space.lacking(need(tokens=(4, 0))) == 0
    space.release(pages[:4])
    space.erase(0)
    space.check(need(index=(1, 0)))
    assert space.lacking(need(index=(1, 0))) is None and space.erases[0] == 1


def test_blocks_read_often(space):
    fill(space, PageKind.TOKEN, 1, 5)
    space.reads[[1, 3, 5]] = 11, 10, 99
    assert space.find_disturbed(10) == [1]
