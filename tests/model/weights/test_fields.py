import numpy as np
import pytest

from nearflash.model.weights.fields import join_fields, split_fields


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("count", [0, 1, 13, 64])
def test_fields_come_back(bits, count):
    fields = np.random.default_rng(bits).integers(0, 1 << bits, count, np.uint32)
    section = join_fields(fields, bits)
    assert len(section) == -(-bits * count // 8)
    np.testing.assert_array_equal(split_fields(section + bytes(3), bits, count), fields)


def test_the_lowest_bits_come_first():
    assert join_fields(np.array([1, 2, 3]), 4) == bytes([0x21, 0x03])
    assert join_fields(np.array([3, 0, 0, 1, 2]), 2) == bytes([0x43, 0x02])
