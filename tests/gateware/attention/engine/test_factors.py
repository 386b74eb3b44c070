import random

import pytest
from amaranth.sim import Simulator

from nearflash.abi.attention.fixed_point import EXACT_LSB
from nearflash.gateware.attention.engine.factors import Factor

UNIT = 1 << -16 - EXACT_LSB  # of b, in units of a product


@pytest.mark.parametrize("shift", range(9))
def test_bias_is_rounded_and_its_limit_exact(shift):
    """b = RNE(zero · q) to 2^-16; outside from the limit 2^(18 - shift) on, whichever its sign."""
    rng, dut, limit, checked = random.Random(shift), Factor(), 1 << 34 - shift, []

    async def testbench(ctx):
        for _ in range(150):
            near = limit * UNIT + rng.choice([0, 1, -1]) * UNIT // 2 + rng.randint(-2, 2) * UNIT * rng.randint(0, 1)
            exact = rng.choice([near, near + 1, near - 1, rng.randrange(limit * UNIT), rng.randrange(1 << 74)])
            exact *= rng.choice([1, -1])
            negative = exact < 0
            ctx.set(dut.zero, {"bits": (exact - negative) & (1 << 80) - 1, "negative": negative})
            ctx.set(dut.limit_shift, shift)
            await ctx.tick().repeat(Factor.LATENCY)
            whole, rest = divmod(exact, UNIT)
            expected = whole + (rest > UNIT // 2 or (rest == UNIT // 2 and whole & 1))
            outside = abs(expected) >= limit
            assert ctx.get(dut.outside) == outside
            assert outside or ctx.get(dut.b) == expected
            checked.append(outside)

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(testbench)
    simulator.run()
    assert 0.2 < sum(checked) / len(checked) < 0.8
