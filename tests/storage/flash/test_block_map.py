"""Blocks of a flash on good NAND blocks; spares of the same queue, until there are none."""

import numpy as np
import pytest

from nearflash.abi.errors import ReadOnlyError, StorageFullError
from nearflash.storage.flash.block_map import BlockMap
from nearflash.storage.flash.geometry import FlashGeometry

GEOMETRY = FlashGeometry(4096, pages_per_block=4, channels=2, luns=2, blocks=8)


def bad_rows(rows, *bad):
    flags = np.zeros((rows, 4), bool)
    for place in bad:
        flags[divmod(place, 4)] = True
    return flags


def test_bad_blocks_are_left_out_and_spares_are_of_the_same_queue():
    blocks = BlockMap(GEOMETRY, bad_rows(4, 1, 7))
    assert blocks.places.tolist() == [0, 5, 2, 3, 4, 9, 6, 11]
    assert (blocks.bad_blocks, blocks.least_spares) == (2, 1)
    assert blocks.take(1) == 13 and blocks.take(0) == 8
    assert blocks.replace(5, 13) == 9 and blocks.places[5] == 13
    blocks.retire(9)
    assert (blocks.bad_blocks, blocks.least_spares) == (3, 0)


def test_no_spare_and_too_few_good_ones():
    blocks = BlockMap(GEOMETRY, bad_rows(3, 1))
    with pytest.raises(ReadOnlyError, match=r"lun 0 of channel 1 .* none left \(1 of 3 failed before\).* can be read"):
        blocks.take(1)
    with pytest.raises(StorageFullError, match="lun 0 of channel 1 must have 2 good blocks, not 1 of 3"):
        BlockMap(GEOMETRY, bad_rows(3, 1, 5))
