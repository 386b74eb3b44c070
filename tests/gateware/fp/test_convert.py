import numpy as np
import pytest

from nearflash.abi.formats import BF16, FP16
from nearflash.gateware.fp.convert import FromNarrow, ToNarrow
from nearflash.model.fp.convert import from_narrow, to_narrow
from nearflash.verify.fixtures.vectors import narrow_operands, operands

EVERY_PATTERN = np.arange(1 << 16, dtype=np.uint16)


@pytest.fixture(scope="module")
def to_unit(fp_unit):
    return fp_unit(ToNarrow())


@pytest.fixture(scope="module")
def from_unit(fp_unit):
    return fp_unit(FromNarrow())


@pytest.mark.parametrize("number", [FP16, BF16])
def test_to_narrow_equals_the_model(to_unit, same, number):
    a = np.concatenate([*operands(150_000, 1, seed=31), narrow_operands(150_000, number, seed=32)])
    same(to_unit, {"i": a, "bf16": int(number == BF16)}, to_narrow(a, number))


@pytest.mark.parametrize("number", [FP16, BF16])
def test_from_narrow_equals_the_model_everywhere(from_unit, number):
    got = from_unit.run({"i": EVERY_PATTERN, "bf16": int(number == BF16)})
    np.testing.assert_array_equal(got["o"], from_narrow(EVERY_PATTERN, number))


def test_format_goes_with_its_operand(to_unit, from_unit):
    bf16 = np.random.default_rng(33).integers(0, 2, EVERY_PATTERN.size)
    wide = np.where(bf16, from_narrow(EVERY_PATTERN, BF16), from_narrow(EVERY_PATTERN, FP16))
    np.testing.assert_array_equal(from_unit.run({"i": EVERY_PATTERN, "bf16": bf16})["o"], wide)
    narrow = np.where(bf16, to_narrow(wide, BF16)[0], to_narrow(wide, FP16)[0])
    np.testing.assert_array_equal(to_unit.run({"i": wide, "bf16": bf16})["o"], narrow)


def test_latency(to_unit, from_unit):
    assert to_unit.latency() == to_unit.stated_latency
    assert from_unit.latency() == from_unit.stated_latency
