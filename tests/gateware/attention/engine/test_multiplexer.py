import pytest
from amaranth.hdl import Module, Signal
from amaranth.sim import Simulator

from nearflash.gateware.attention.engine.multiplexer import choose


@pytest.mark.parametrize("count", [1, 4, 8])
def test_only_the_bits_that_count_choose(count):
    m, number, o = Module(), Signal(4), Signal(8)
    m.d.comb += o.eq(choose([Signal(8, init=10 + k) for k in range(count)], number))

    async def testbench(ctx):
        for value in range(16):
            ctx.set(number, value)
            await ctx.delay(1e-9)
            assert ctx.get(o) == 10 + value % count

    simulator = Simulator(m)
    simulator.add_testbench(testbench)
    simulator.run()


def test_options_must_be_a_power_of_two():
    with pytest.raises(ValueError, match="options must be a power of two of values, not 3"):
        choose([Signal(), Signal(), Signal()], Signal(2))
