import random

import numpy as np
from amaranth.hdl import Module, Signal
from amaranth.sim import Simulator

from nearflash.gateware.nand.bch import field
from nearflash.model.nand.bch.encoder import generator
from nearflash.model.nand.bch.field import multiply, power


def test_generator_equals_model():
    assert field.generator() == generator()


def test_powers_equal_model():
    exponents = list(range(-40, 40))
    assert [field.power(e) for e in exponents] == [int(power(e)) for e in exponents]


def test_multiply_equals_model():
    rng = random.Random(1)
    m, a, b, product = Module(), Signal(13), Signal(13), Signal(13)
    m.d.comb += product.eq(field.multiply(m, a, b))
    simulator = Simulator(m)

    async def bench(ctx):
        for _ in range(100):
            x, y = rng.getrandbits(13), rng.getrandbits(13)
            ctx.set(a, x)
            ctx.set(b, y)
            await ctx.delay(1e-9)
            assert ctx.get(product) == multiply(np.array([x]), np.array([y]))[0]

    simulator.add_testbench(bench)
    simulator.run()
