"""The reference of coded weights: what its own packer writes, and the product's, comes back."""

from dataclasses import replace

import numpy as np
import pytest

from nearflash.abi.bitmap import HEADER_BYTES, ElementFormat
from nearflash.abi.coded import CodedHeader
from nearflash.device.selftest.expand import CODED_FORMATS, random_coded
from nearflash.model.weights.levels import expand_levels, pack_levels, read_blocks
from nearflash.weights.coded import pack_coded


@pytest.mark.parametrize("form", CODED_FORMATS)
@pytest.mark.parametrize("density", [0.0, 0.5, 1.0])
def test_packed_weights_come_back(form, density):
    rng = np.random.default_rng(1)
    words = np.where(rng.random(700) < density, rng.integers(0, 1 << 16, 700, np.uint16), np.uint16(0))
    stream = pack_levels(words, *form, 300, 2)
    np.testing.assert_array_equal(expand_levels(stream), words)
    assert [(dense.size, values <= dense.size) for dense, values in read_blocks(stream)] == [
        (300, True), (300, True), (100, True)
    ]  # fmt: skip


def test_the_products_packer_writes_the_same():
    stream = random_coded(np.random.default_rng(2), 900, 1.0, (ElementFormat.BF16, 2, False), 400, 4)
    assert pack_coded(expand_levels(stream), block_elements=400) == stream


def test_a_group_of_more_blocks_than_there_are_ends_with_the_last_one():
    """The reference counted them to the end, up to 2^32."""
    stream = random_coded(np.random.default_rng(3), 900, 0.5, (ElementFormat.BF16, 2, False), 400, 4)
    header = replace(CodedHeader.unpack(stream[:HEADER_BYTES], len(stream)), group_blocks=(1 << 32) - 1)
    np.testing.assert_array_equal(expand_levels(header.pack() + stream[HEADER_BYTES:]), expand_levels(stream))
