import random

import pytest
from amaranth.hdl import Module, Signal
from amaranth.sim import Simulator

from nearflash.gateware.coding import linear


def applied(columns: list[int], value: int) -> int:
    result = 0
    for k, column in enumerate(columns):
        result ^= (value >> k & 1) * column
    return result


@pytest.mark.parametrize("width", [1, 13, 40])
def test_apply(width):
    rng = random.Random(width)
    columns = [rng.getrandbits(width) for _ in range(21)]
    m, value, result = Module(), Signal(21), Signal(width)
    m.d.comb += result.eq(linear.apply(m, columns, value, width))
    simulator = Simulator(m)

    async def bench(ctx):
        for given in [0, *(1 << k for k in range(21)), *(rng.getrandbits(21) for _ in range(50))]:
            ctx.set(value, given)
            await ctx.delay(1e-9)
            assert ctx.get(result) == applied(columns, given)

    simulator.add_testbench(bench)
    simulator.run()


def test_product_and_power():
    rng = random.Random(1)
    first, second = ([rng.getrandbits(13) for _ in range(13)] for _ in range(2))
    for value in (rng.getrandbits(13) for _ in range(50)):
        assert applied(linear.product(first, second), value) == applied(first, applied(second, value))
    stepped = 1
    for exponent in range(20):
        assert applied(linear.power(first, exponent), 1) == stepped
        stepped = applied(first, stepped)
