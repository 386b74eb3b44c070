import numpy as np

from nearflash.abi.formats import BF16, FP16
from nearflash.model.fp.convert import to_narrow
from nearflash.sim.vectors import corner_pairs, corner_values, narrow_operands, operands


def test_corners_hold_every_special_value():
    corners = set(corner_values().tolist())
    assert {0, 1, 0x007FFFFF, 0x00800000, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000} <= corners
    assert {value ^ (1 << 31) for value in corners} == corners


def test_pairs_are_all_pairs():
    a, b = corner_pairs()
    assert len(a) == len(corner_values()) ** 2
    assert len(np.unique(a.astype(np.uint64) << np.uint64(32) | b)) == len(a)


def test_operands_are_seeded_and_related():
    a, b, c = operands(30_000, 3, seed=1)
    np.testing.assert_array_equal(operands(30_000, 3, seed=1), [a, b, c])
    assert (operands(30_000, 3, seed=2)[0] != a).any()
    exponents = [(x >> np.uint32(23) & np.uint32(255)).astype(int) for x in (a, b, c)]
    assert np.mean(np.abs(exponents[0] - exponents[1]) <= 2) > 0.15, "sums that cancel"
    assert np.mean(np.abs(exponents[0] + exponents[1] - 127 - exponents[2]) <= 50) > 0.3, "addends near the product"


def test_narrow_operands_reach_ties_and_overflow():
    for number in (FP16, BF16):
        a = narrow_operands(20_000, number, seed=3)
        _, flags = to_narrow(a, number)
        assert {0, 1, 3, 5} <= set(np.unique(flags).tolist())
