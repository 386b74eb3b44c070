"""Datapaths bring operands to the same cycle by themselves."""

import pytest
from amaranth import Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from amaranth.sim import Simulator

from nearflash.gateware.stream.datapath import Datapath, Timed


class Slow(wiring.Component):
    """a - b, three cycles later."""

    LATENCY = 3
    a: In(8)
    b: In(8)
    o: Out(8)

    def elaborate(self, platform: object) -> Module:
        m = Module()
        stages = [Signal(8, name=f"stage_{n}") for n in range(2)]
        m.d.sync += [stages[0].eq(self.a - self.b), stages[1].eq(stages[0]), self.o.eq(stages[1])]
        return m


def test_operands_that_come_at_different_cycles_meet() -> None:
    m = Module()
    path = Datapath(m)
    x = Signal(8)
    once = path.call("once", Slow(), a=Timed(x, 0), b=1)
    twice = path.call("twice", Slow(), a=once, b=Timed(x, 0))
    assert (once.cycle, twice.cycle) == (3, 6)
    o = Signal(8)
    m.d.comb += o.eq(twice.value)
    seen = []

    async def drive(ctx):  # type: ignore[no-untyped-def]
        for value in range(20):
            ctx.set(x, value * 7 % 256)
            seen.append(ctx.get(o))
            await ctx.tick()

    sim = Simulator(m)
    sim.add_clock(1e-6)
    sim.add_testbench(drive)
    sim.run()
    assert seen[twice.cycle :] == [255] * (20 - twice.cycle)


def test_a_unit_may_take_an_operand_late() -> None:
    path = Datapath(Module())
    unit = Slow()
    unit.ARRIVAL = {"b": 2}
    result = path.call("unit", unit, a=Timed(Signal(8), 1), b=Timed(Signal(8), 4))
    assert result.cycle == 2 + Slow.LATENCY


def test_a_value_is_delayed_by_one_chain_of_registers() -> None:
    path = Datapath(Module())
    timed = Timed(Signal(4), 2)
    late = path.delay(timed, 5)
    assert path.delay(timed, 5) is late
    assert path.delay(timed, 2) is timed.value
    with pytest.raises(ValueError, match="cycle must be at least 2, when the value is there, not 1"):
        path.delay(timed, 1)
