import pytest
from amaranth import Module, Signal
from amaranth.sim import Simulator

from nearflash.gateware.coding.kept_net import equal, keep_net


@pytest.mark.parametrize("width", [1, 3, 10, 32])
def test_equal_looks_at_every_bit(width):
    m, first, second, same, kept = Module(), Signal(width), Signal(width), Signal(), Signal(width)
    m.d.comb += [same.eq(equal(m, first, second)), kept.eq(keep_net(m, first))]

    async def bench(ctx):
        for word in (0, (1 << width) - 1, 0x2F5A1C3 & (1 << width) - 1):
            ctx.set(first, word)
            ctx.set(second, word)
            assert ctx.get(same)
            assert ctx.get(kept) == word
            for bit in range(width):
                ctx.set(second, word ^ 1 << bit)
                assert not ctx.get(same)

    simulator = Simulator(m)
    simulator.add_testbench(bench)
    simulator.run()
