import numpy as np
import pytest
from amaranth.sim import Simulator

from nearflash.abi.bitmap import section_bytes
from nearflash.gateware.weights.popcount import Counted, Popcount

BITS_MAX = 4096
FIELD_BITS = {Counted.ONES: 1, Counted.THREES_OF_4: 4, Counted.THREES_OF_2: 2}


def count(component, sections, counted):
    """(count, beyond) of each section LATENCY cycles after its last word; random words with gaps between."""
    found = []
    simulator = Simulator(component)
    simulator.add_clock(1e-6)

    async def bench(ctx):
        ctx.set(component.counted, counted)
        for number, (bits, words) in enumerate(sections):
            ctx.set(component.begin, 1)
            ctx.set(component.bits, bits)
            await ctx.tick()
            ctx.set(component.begin, 0)
            for word in words:
                ctx.set(component.enable, 0)
                await ctx.tick().repeat(number % 2 + 1)
                ctx.set(component.enable, 1)
                ctx.set(component.word, word)
                await ctx.tick()
            ctx.set(component.enable, 0)
            await ctx.tick().repeat(component.LATENCY - 1)
            found.append((ctx.get(component.count), ctx.get(component.beyond)))

    simulator.add_testbench(bench)
    simulator.run()
    return found


@pytest.mark.parametrize("counted", Counted)
@pytest.mark.parametrize("port_bits", [64, 512])
def test_counts_what_is_of_the_section(port_bits, counted):
    """Ends in every kind of place of a block, words of padding behind; of half of the sections the padding is zero."""
    rng, field = np.random.default_rng(port_bits), FIELD_BITS[counted]
    sections, expected = [], []
    for number, bits in enumerate((4, 64, 68, 508, 512, 516, 1000, 2048, 0)):
        text = rng.integers(0, 256, section_bytes(bits), np.uint8)
        every = np.unpackbits(text, bitorder="little")
        if number % 2:
            every[bits:] = 0
        text = np.packbits(every, bitorder="little").tobytes()
        words = [int.from_bytes(text[at : at + port_bits // 8], "little") for at in range(0, len(text), port_bits // 8)]
        lowest = every[:bits].reshape(-1, field)[:, :2]
        expected.append((int(lowest.all(axis=1).sum()), int(every[bits:].any())))
        sections.append((bits, words))
    assert count(Popcount(port_bits, BITS_MAX), sections, counted) == expected
