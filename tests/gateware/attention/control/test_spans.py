import random

import pytest
from amaranth.sim import Simulator

from nearflash.abi.attention.pages import TokenLayout
from nearflash.gateware.attention.control.spans import TokenSpans


def codewords(layout, tokens, values):
    """By the ABI's layout."""
    found = 0
    for token in tokens:
        for value in (False, True) if values else (False,):
            start, end = layout.span(token, value=value)
            for number in range(start // 512, (end - 1) // 512 + 1):
                found |= 1 << number
    return found


@pytest.mark.parametrize("dim", [4, 64, 80, 128, 200, 256])
@pytest.mark.parametrize("interleaved", [False, True])
def test_codewords_of_tokens(dim, interleaved):
    rng = random.Random(dim)
    unit = TokenSpans()

    async def bench(ctx):
        for _ in range(12):
            page_bytes = rng.choice([4096, 8192, 16384])
            values = rng.random() < 0.7
            n = TokenLayout.capacity(page_bytes, dim, interleaved)
            layout = TokenLayout(page_bytes, dim, rng.randrange(4, n + 1, 4), interleaved)
            tokens = {t for t in range(layout.tokens) if rng.random() < rng.choice([0.1, 0.5, 1])}
            settings = {"dim_rows": dim // 4, "interleaved": interleaved, "page_codewords": page_bytes // 512,
                        "values": values}  # fmt: skip
            for name, value in settings.items():
                ctx.set(getattr(unit, name), value)
            await ctx.tick().repeat(3)
            ctx.set(unit.begin, 1)
            await ctx.tick()
            ctx.set(unit.begin, 0)
            for step in range(layout.tokens // 4):
                ctx.set(unit.step, 1)
                ctx.set(unit.wanted, sum((4 * step + k in tokens) << k for k in range(4)))
                await ctx.tick()
                ctx.set(unit.step, 0)
                if rng.random() < 0.5:
                    await ctx.tick()
            await ctx.tick().repeat(unit.LATENCY - 1)
            assert ctx.get(unit.codewords) == codewords(layout, tokens, values)

    sim = Simulator(unit)
    sim.add_clock(1e-6)
    sim.add_testbench(bench)
    sim.run()
