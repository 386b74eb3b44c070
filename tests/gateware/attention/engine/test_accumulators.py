from amaranth.sim import Simulator

from nearflash.gateware.attention.engine.accumulators import Accumulators
from nearflash.gateware.attention.numerics.add import WordAdd

HEADS, SUM, CUT, SCORE = 2, {"scores": 0, "write": 3}, 32, 36
HALF = 1 << SCORE


def run(steps):
    """One step every few cycles: a row, what each lane's product is, and what the words of a head are before it."""
    dut, found = Accumulators(HEADS, 8, 1), []

    async def testbench(ctx):
        for row, products in steps:
            ctx.set(dut.i, {"head": 0, "address": 0, "fresh": 0, **row})
            await ctx.tick()
            ctx.set(dut.i, {"write": 0})
            for lane, product in enumerate(products):
                ctx.set(dut.product[lane].bits, product)
            await ctx.tick()
            found.append([ctx.get(word) for word in dut.o])
            await ctx.tick().repeat(Accumulators.WRITE_LATENCY + 1 - Accumulators.READ_LATENCY)

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(testbench)
    simulator.run()
    return found


def test_sums_and_scores_do_not_touch_each_other():
    """Each step reads what the ones before left, WRITE_LATENCY + 1 cycles earlier: latencies and places as stated."""
    products, none = [100 + k << CUT for k in range(8)], [0] * 8
    scores = {"scores": 1, "address": 5}
    found = run([
        ({**SUM, "address": 5, "fresh": 1}, products),
        ({**scores, "write": 1, "fresh": 1}, products),
        ({**scores, "write": 2}, products),
        ({**scores, "write": 2}, products),
        ({**scores, "write": 0, "head": 1}, none),
        ({**SUM, "address": 5}, products),
        ({**SUM, "address": 5, "write": 0, "head": 1}, none),
        ({**SUM, "address": 4, "write": 0, "fresh": 1}, none),
    ])  # fmt: skip
    head = [[100 + k for k in range(4)], [104 + k for k in range(4)]]
    assert found[0] == found[1] == found[7] == [0] * 4
    for step, parts in ((2, 1), (3, 1 + HALF), (4, 1 + 2 * HALF)):
        low = [word % (1 << 2 * SCORE) for word in found[step]]
        assert low == [one * parts for one in head[step == 4]]
    assert found[5] == [one << CUT for one in head[0]]
    assert found[6] == [2 * one << CUT for one in head[1]]


def test_latency():
    assert Accumulators.WRITE_LATENCY == 1 + WordAdd.LATENCY
