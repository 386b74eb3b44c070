import numpy as np
import pytest
from amaranth.hdl import Module
from amaranth.lib import wiring
from amaranth.sim import Simulator

from nearflash.gateware.attention.numerics.product import (
    MULTIPLICAND,
    MULTIPLIER,
    PRODUCT,
    PRODUCT_BITS,
    ExactProduct,
    magnitude_exceeds,
)
from nearflash.gateware.attention.numerics.product import fp16_operand as operand_of
from nearflash.model.attention.numerics.product import exact_product, exceeds, fp16_operand, multiply_truncated
from nearflash.sim.verilator.ports import integers_from_words

COUNT = 60_000


@pytest.fixture(scope="module")
def unit(num_unit):
    return num_unit(ExactProduct())


def values(words):
    """The numbers of PRODUCT words: signed, plus one where negative."""
    raw = np.array(integers_from_words(words), object)
    negative = raw >> PRODUCT_BITS
    return raw - (negative << PRODUCT_BITS + 1) + negative


def numbers(a, b):
    """Both operands of fp16 bits, as the ports hold them."""
    inputs = {}
    for name, bits, layout in (("a", a, MULTIPLICAND), ("b", b, MULTIPLIER)):
        packed = fp16_operand(bits.view(np.float16))
        inputs[name] = integers(packed & 0x3FFF, packed >> 14 & 7, layout) | packed >> 17 << layout.size - 1
    return inputs


def integers(values, places, layout):
    bits = layout["value"].width
    return values & (1 << bits) - 1 | np.int64(places) << bits


def test_equals_the_model(unit, fp16_bits):
    a, b = fp16_bits(COUNT, 1), fp16_bits(COUNT, 2)
    got = unit.run({**numbers(a, b), "truncate": 0})
    np.testing.assert_array_equal(values(got["o"]), exact_product(a.view(np.float16), b.view(np.float16)))


def test_cut_equals_the_model(unit, fp16_bits):
    a, b = fp16_bits(COUNT, 3), fp16_bits(COUNT, 4)
    got = unit.run({**numbers(a, b), "truncate": 1})
    expected = multiply_truncated(a.view(np.float16), b.view(np.float16)).astype(object)
    np.testing.assert_array_equal(values(got["o"]), expected << 32)


def test_latency(unit):
    assert unit.latency() == unit.stated_latency


class Exceeds(wiring.Component):
    """magnitude_exceeds as a component."""

    LATENCY = 0

    def __init__(self):
        super().__init__({"product": wiring.In(PRODUCT), "limit_shift": wiring.In(4), "o": wiring.Out(1)})

    def elaborate(self, platform):
        m = Module()
        m.d.comb += self.o.eq(magnitude_exceeds(m, self.product, self.limit_shift))
        return m


def test_magnitude_exceeds_equals_the_model():
    dut, rng = Exceeds(), np.random.default_rng(7)
    cases = []
    for shift in range(9):
        edge = 2.0 ** ((19 - shift) / 2)
        for _ in range(20):
            a = np.float16(edge * rng.uniform(0.5, 2) * rng.choice([-1, 1]))
            b = np.float16(2.0 ** (19 - shift) / float(a) * rng.choice([0.5, 0.999, 1, 1, 1.001, 2]))
            cases.append((a, b, shift))
        cases.append((np.float16(2**9), np.float16(2.0 ** (10 - shift)), shift))
    results = []

    async def testbench(ctx):
        for a, b, shift in cases:
            exact = int(exact_product(np.array([a]), np.array([b]))[0])
            negative = exact < 0
            ctx.set(dut.product, {"bits": (exact - negative) & (1 << PRODUCT_BITS) - 1, "negative": negative})
            ctx.set(dut.limit_shift, shift)
            await ctx.delay(1e-9)
            results.append(ctx.get(dut.o))

    simulator = Simulator(dut)
    simulator.add_testbench(testbench)
    simulator.run()
    expected = [bool(exceeds(np.array([a]), np.array([b]), 1 << shift)[0]) for a, b, shift in cases]
    assert [bool(one) for one in results] == expected
    assert 0.2 < np.mean(expected) < 0.8


def test_integers(unit):
    rng = np.random.default_rng(8)
    factor, code = rng.integers(-(1 << 17), 1 << 17, COUNT), rng.integers(-(1 << 24), 1 << 24, COUNT)
    factor[:4], code[:4] = [0, -1, -(1 << 17), (1 << 17) - 1], [-1, 1, -(1 << 24), -(1 << 24)]
    for places, place, bits in (
        (ExactProduct.INTEGER_PLACES, ExactProduct.INTEGER_PLACE, 43),
        (ExactProduct.SHORT_PLACES, ExactProduct.SHORT_PLACE, 36),
    ):
        a, b = integers(code, places[0], MULTIPLICAND), integers(factor, places[1], MULTIPLIER)
        got, mask = unit.run({"a": a, "b": b, "truncate": 0}), (1 << bits) - 1
        expected = (factor * code).astype(object) & mask
        np.testing.assert_array_equal(values(got["o"]) >> place & mask, expected)


class Operand(wiring.Component):
    """`fp16_operand` as a component."""

    LATENCY = 0

    def __init__(self):
        super().__init__({"i": wiring.In(16), "o": wiring.Out(18)})

    def elaborate(self, platform):
        m = Module()
        m.d.comb += self.o.eq(operand_of(m, self.i))
        return m


def test_operand_equals_the_model(num_unit):
    bits = np.arange(1 << 16, dtype=np.uint16)
    finite = np.isfinite(bits.view(np.float16))
    got = num_unit(Operand()).run({"i": bits})["o"]
    np.testing.assert_array_equal(got[finite], fp16_operand(bits.view(np.float16))[finite])
