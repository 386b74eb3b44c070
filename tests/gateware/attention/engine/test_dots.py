from amaranth.sim import Simulator

from nearflash.abi.attention.faults import Fault
from nearflash.gateware.attention.engine.beats import OpKind
from nearflash.gateware.attention.engine.dots import DotPath


def test_latency():
    """One token of a tail, of one beat; then the same with a product that breaks the range rule."""
    dut, found = DotPath(1, 2), []

    async def testbench(ctx):
        for exceeds in (0, 1):
            op = {"kind": OpKind.KEY, "tail": 1, "first": 1, "last": 1, "heads": 1, "token": 5}
            ctx.set(dut.i, {"valid": 1, "op": op})
            ctx.set(dut.product[0].bits, 3 << 32)
            ctx.set(dut.exceeds, exceeds << 2)
            await ctx.tick()
            ctx.set(dut.i.valid, 0)
            for cycle in range(1, 16):
                if ctx.get(dut.o_tail.valid):
                    found.append((cycle, ctx.get(dut.o_tail.scores)[0], ctx.get(dut.o_fault.faults)))
                await ctx.tick()

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(testbench)
    simulator.run()
    assert found == [(DotPath.LATENCY, 3, 0), (DotPath.LATENCY, 3, Fault.SCORE_RANGE)]


def test_a_slot_is_fresh_again_after_a_drain():
    """`fresh` holds for the first token of a slot and for the first one after `renew`, for all its sets; no other."""
    dut, found = DotPath(1, 2), []
    steps = ["set", "last set", "set", "last set", "renew", "set", "last set", "last set"]

    async def testbench(ctx):
        ctx.set(dut.record.slot, 1)
        ctx.set(dut.o.ready, 1)
        for step in steps:
            renew, final = step == "renew", step == "last set"
            ctx.set(dut.renew, {"valid": renew, "slot": 1})
            op = {"kind": OpKind.KEY, "first": 1, "last": 1, "heads": 1, "final": final}
            ctx.set(dut.i, {"valid": not renew, "op": op})
            for _ in range(10):
                await ctx.tick()
                ctx.set(dut.i.valid, 0)
                ctx.set(dut.renew.valid, 0)
                if ctx.get(dut.o.valid):
                    found.append(ctx.get(dut.o.payload.fresh))

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(testbench)
    simulator.run()
    assert found == [1, 1, 0, 0, 1, 1, 0]
