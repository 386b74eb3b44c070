import numpy as np
import pytest

from nearflash.abi.formats import BF16, FP16
from nearflash.model.fp.convert import from_narrow, to_bf16, to_fp16, to_narrow
from nearflash.verify.fixtures.softfloat import softfloat
from nearflash.verify.fixtures.vectors import narrow_operands, operands

EVERY_PATTERN = np.arange(1 << 16, dtype=np.uint16)


@pytest.mark.parametrize("number", [FP16, BF16])
def test_to_narrow_equals_softfloat(number):
    a = np.concatenate([*operands(30_000, 1, seed=12), narrow_operands(30_000, number, seed=13)])
    bits, flags = to_narrow(a, number)
    expected, expected_flags = softfloat(f"to_{number.name}", a)
    np.testing.assert_array_equal(bits, expected)
    np.testing.assert_array_equal(flags, expected_flags)
    assert set(np.unique(flags)) == {0, 1, 3, 5, 16}


@pytest.mark.parametrize("number", [FP16, BF16])
def test_every_narrow_value_survives(number):
    wide = from_narrow(EVERY_PATTERN, number)
    back, flags = to_narrow(wide, number)
    nan = np.isnan(wide.view(np.float32))
    np.testing.assert_array_equal(back, np.where(nan, number.canonical_nan, EVERY_PATTERN))
    assert not flags.any()


def test_values():
    value = np.array([1.0, -2.0, 65504.0, 65520.0, 2.0**-24, 2.0**-25, np.nan], np.float32)
    assert to_fp16(value).tolist() == [0x3C00, 0xC000, 0x7BFF, 0x7C00, 0x0001, 0x0000, 0x7E00]
    assert to_bf16(value).tolist() == [0x3F80, 0xC000, 0x4780, 0x4780, 0x3380, 0x3300, 0x7FC0]
