import numpy as np
import pytest

from nearflash.gateware.fp.muladd import MulAdd
from nearflash.gateware.fp.raw import RawLayout
from nearflash.model.fp.add import add
from nearflash.model.fp.mul import mul
from nearflash.model.fp.muladd import RECIPROCAL_BITS, Reciprocal, mul_reciprocal, muladd
from nearflash.sim.verilator.burst import words_from_integers
from nearflash.verify.fixtures.vectors import operands

MINUS_ZERO = 1 << 31


@pytest.fixture(scope="module", params=[24, RECIPROCAL_BITS])
def unit(fp_unit, request):
    return fp_unit(MulAdd(request.param))


@pytest.fixture(scope="module")
def divider(fp_unit):
    return fp_unit(MulAdd(RECIPROCAL_BITS), unpacked=("b",))


@pytest.mark.parametrize("fused", [False, True])
def test_equals_the_model(unit, same, fused):
    a, b, c = operands(300_000, 3, seed=26)
    same(unit, {"a": a, "b": b, "c": c, "fused": int(fused)}, muladd(a, b, c, fused=fused))


def test_fused_goes_with_its_operands(unit):
    a, b, c = operands(20_000, 3, seed=27)
    fused = np.random.default_rng(27).integers(0, 2, a.size)
    got = unit.run({"a": a, "b": b, "c": c, "fused": fused})
    expected = np.where(fused, muladd(a, b, c, fused=True)[0], muladd(a, b, c, fused=False)[0])
    np.testing.assert_array_equal(got["o"], expected)


def test_minus_zero_leaves_the_product(unit, same):
    a, b = operands(100_000, 2, seed=28)
    for fused in (0, 1):
        same(unit, {"a": a, "b": b, "c": MINUS_ZERO, "fused": fused}, mul(a, b))


def test_product_is_cleared_below_its_subnormal_position(unit):
    """Regression: a discarded bit of a subnormal product reached the addend's last bit."""
    got = unit.run({"a": 0x3CFFFC00, "b": 0x807C0000, "c": 0x0014316D, "fused": 0})
    assert got["o"].tolist() == [0x0010517D]


def test_latency(unit):
    assert unit.latency() == unit.stated_latency


@pytest.mark.parametrize("s", [3.0, -0.1, 1.9999998807907104, 2.0**-149, 2.0**127, 0.9995003])
def test_division_by_an_invariant(divider, same, s):
    layout, reciprocal = RawLayout(RECIPROCAL_BITS), Reciprocal.of(float(np.float32(s)))
    b = layout.const({"sig": reciprocal.sig, "exp": reciprocal.exp, "sign": reciprocal.sign}).as_value().value
    a, c = operands(30_000, 2, seed=29)
    product, product_flags = mul_reciprocal(a, reciprocal)
    total, sum_flags = add(product, c)
    inputs = {"a": a, "b": words_from_integers([b], layout.size)[0], "c": c, "fused": 0}
    same(divider, inputs, (total, product_flags | sum_flags))
    same(divider, {**inputs, "c": MINUS_ZERO}, (product, product_flags))


def test_width_message():
    with pytest.raises(ValueError, match="multiplicand_bits must be at least 24, not 23"):
        MulAdd(23)
