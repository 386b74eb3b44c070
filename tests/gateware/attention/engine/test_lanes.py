from amaranth.sim import Simulator

from nearflash.gateware.attention.engine.beats import OpKind
from nearflash.gateware.attention.engine.lanes import Lanes

ONE, INFINITY = 0x3C00, 0x7C00
ONE_OPERAND = {"value": 1 << 13, "places": 3, "negative": 0}


def cycles_until(element, port):
    """Cycles from one operation of K to the first value of `port` that is not zero."""
    dut, found = Lanes(1, 4, 4), []

    async def testbench(ctx):
        ctx.set(dut.i_query, {"valid": 1, "row": {"address": 0, "values": [[ONE_OPERAND] * 4], "selected": 0}})
        await ctx.tick().repeat(12)
        ctx.set(dut.i_query.valid, 0)
        ctx.set(dut.op, {"kind": OpKind.KEY, "data": sum(element << 16 * j for j in range(4))})
        await ctx.tick()
        ctx.set(dut.op, {"kind": OpKind.KEY, "data": 0})
        for cycle in range(1, 16):
            if ctx.get(port(dut)) != 0:
                found.append(cycle)
            await ctx.tick()

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(testbench)
    simulator.run()
    return found


def test_latency():
    assert cycles_until(ONE, lambda dut: dut.o[3].bits) == [Lanes.LATENCY]
    assert cycles_until(INFINITY, lambda dut: dut.nonfinite) == [Lanes.NONFINITE_LATENCY]
