import numpy as np
import pytest
from amaranth.hdl import Module, Signal, signed, unsigned
from amaranth.sim import Simulator

from nearflash.gateware.attention.numerics.fp16 import ToFp16, order_key
from nearflash.model.attention.numerics.fp16 import order_key as model_key
from nearflash.model.attention.numerics.fp16 import to_fp16

COUNT = 100_000


@pytest.mark.parametrize(("shape", "lsb"), [(signed(23), -8), (unsigned(43), -27)])
def test_equals_the_model(num_unit, shape, lsb):
    unit = num_unit(ToFp16(shape, lsb), f"_{shape.width}")
    rng = np.random.default_rng(shape.width)
    least = -(1 << shape.width - 1) if shape.signed else 0
    most = least + (1 << shape.width) - 1
    value = rng.integers(least, most + 1, COUNT) >> rng.integers(0, shape.width, COUNT)
    ties = 2 * rng.integers(1 << 10, 1 << 11, COUNT) + 1 << rng.integers(0, shape.width - 12, COUNT)
    ties += rng.integers(-1, 2, COUNT)
    value = np.concatenate([value, ties, -ties, np.arange(-70, 71), [least, most]]).clip(least, most)
    np.testing.assert_array_equal(unit.run({"i": value})["o"], to_fp16(value, lsb).view(np.uint16))
    assert unit.latency() == unit.stated_latency


def test_every_integer_of_a_narrow_one(num_unit):
    """Through all subnormals and past the largest number."""
    for lsb in (-26, 2):
        unit = num_unit(ToFp16(signed(16), lsb), f"_16_{lsb + 26}")
        value = np.arange(-(1 << 15), 1 << 15)
        np.testing.assert_array_equal(unit.run({"i": value})["o"], to_fp16(value, lsb).view(np.uint16))


def test_shape_message():
    with pytest.raises(ValueError, match="shape must have 2 to 64 bits, not 65"):
        ToFp16(signed(65), 0)


def test_order_key_equals_the_model():
    bits, key, m = Signal(16), Signal(16), Module()
    m.d.comb += key.eq(order_key(bits))
    values = [*range(0, 1 << 16, 37), 0x8000, 0x7FFF, 0xFFFF]
    found = []

    async def testbench(ctx):
        for value in values:
            ctx.set(bits, value)
            await ctx.delay(1e-9)
            found.append(ctx.get(key))

    simulator = Simulator(m)
    simulator.add_testbench(testbench)
    simulator.run()
    assert found == model_key(np.array(values, np.uint16).view(np.float16)).tolist()
