"""The tree and the accumulator alone, on Amaranth's simulator; dot products of fp16 operands are in test_mac."""

import numpy as np
import pytest
from amaranth.sim import Simulator

from nearflash.gateware.attention.numerics.dot import LANES, ExactDot
from nearflash.gateware.attention.numerics.product import PRODUCT_BITS


@pytest.mark.parametrize("sums", [1, 3])
def test_sums_products_over_lanes_and_beats(sums):
    rng, dut, found = np.random.default_rng(1), ExactDot(sums), []
    largest = (1 << PRODUCT_BITS) - 1
    edges = np.array([0, 1, largest, largest - 1, 1 << 44, (1 << 45) - 1, 1 << 45], object)
    values = [int.from_bytes(rng.bytes(10), "little") if rng.integers(2) else rng.choice(edges) for _ in range(1600)]
    values = [int(rng.choice([-1, 1])) * int(value) for value in values]
    beats = [values[k : k + LANES] for k in range(0, 1600, LANES)]
    valid, last = rng.integers(0, 4, 400) != 0, rng.integers(0, 4, 400) == 0
    totals, first, expected = [0] * sums, [True] * sums, []

    async def testbench(ctx):
        for cycle in range(400 + dut.LATENCY):
            k, index = min(cycle, 399), cycle % sums
            for product, value in zip(dut.products, beats[k], strict=True):
                bits = value if value >= 0 else largest + value
                ctx.set(product, {"bits": bits, "negative": value < 0})
            for name, value in (
                ("valid", valid[k] and cycle < 400),
                ("last", last[k]),
                ("first", first[index]),
                ("index", index),
            ):
                ctx.set(getattr(dut, name), int(value))
            if valid[k] and cycle < 400:
                totals[index] = sum(beats[k]) + (0 if first[index] else totals[index])
                first[index] = bool(last[k])
                expected.extend([(cycle + dut.LATENCY, totals[index])] if last[k] else [])
            if ctx.get(dut.o_valid):
                found.append((cycle, ctx.get(dut.o)))
            await ctx.tick()

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(testbench)
    simulator.run()
    assert found == expected
    assert len(expected) > 50
