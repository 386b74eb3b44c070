"""Outputs of a head from its sums, against the model."""

import random

import numpy as np
import pytest
from amaranth.sim import Simulator

from nearflash.abi.attention.faults import Fault
from nearflash.gateware.attention.control.mix import Mix
from nearflash.model.attention.gather import Gathered, finish


def run(shares, sums, v_mean):
    """Outputs (g, d) as bits. shares: (numerator, denominator) by head; sums: (l, N of all elements) by head."""
    mix, out = Mix(), []
    tags = [({"sum": den, "tag": {"denominator": 1, "share": 1, "head": h}}) for h, (_, den) in enumerate(shares)]
    tags += [({"sum": num, "tag": {"share": 1, "head": h}}) for h, (num, _) in enumerate(shares)]
    items = [({"sum": low, "tag": {"denominator": 1, "head": h}}) for h, (low, _) in enumerate(sums)]
    items += [
        ({"sum": one, "tag": {"head": h, "element": e}}) for h, (_, row) in enumerate(sums) for e, one in enumerate(row)
    ]

    async def bench(ctx):
        for address, word in enumerate(v_mean.view("<u8")):
            ctx.set(mix.mean, {"valid": 1, "address": address, "word": int(word)})
            await ctx.tick()
        ctx.set(mix.mean.valid, 0)
        for part in (tags, items):
            for item in part:
                ctx.set(mix.i, item)
                ctx.set(mix.i_valid, 1)
                await ctx.tick()
                if ctx.get(mix.o_valid):
                    out.append(ctx.get(mix.o))
            ctx.set(mix.i_valid, 0)
            cycles = 0
            while ctx.get(mix.busy):
                await ctx.tick()
                cycles += 1
                if ctx.get(mix.o_valid):
                    out.append(ctx.get(mix.o))
            assert cycles == mix.LATENCY

    simulator = Simulator(mix)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()
    return np.array(out, np.uint16).reshape(len(sums), -1)


@pytest.mark.parametrize("seed", range(3))
def test_outputs_equal_the_model(seed):
    rng, group, dim = random.Random(seed), (1, 3, 8)[seed], 16
    denominators = [rng.getrandbits(50) | 1 << 40 for _ in range(group)]
    shares = [(rng.choice([d, rng.randrange(d)]), d) for d in denominators]
    l_sums = [rng.getrandbits(rng.randrange(26, 60)) | 1 << 25 for _ in range(group)]
    sums = [(low, [rng.randrange(-16 * low, 16 * low) if e else 0 for e in range(dim)]) for low in l_sums]
    v_mean = np.random.default_rng(seed).standard_normal(dim).astype(np.float32)
    v_mean[1:4] = -0.0, 3e-39, 7e4
    numerator = np.array([row for _, row in sums], object)
    gathered = Gathered(np.array(l_sums, object), numerator, (0,) * group, Fault(0))
    alpha = np.array([np.float32(n) / np.float32(d) for n, d in shares], np.float32)
    want = finish(gathered, alpha, v_mean).view(np.uint16)
    np.testing.assert_array_equal(run(shares, sums, v_mean), want)


def test_a_mean_that_is_not_finite_does_not_matter_where_alpha_is_one():
    v_mean = np.array([np.inf, np.nan, -1, 1], np.float32)
    out = run([(5, 5)], [(1 << 30, [0, 1 << 30, -(1 << 29), 3])], v_mean)
    assert out.view(np.float16).tolist() == [[0.0, 1.0, -0.5, 0.0]]
