"""Lines of the selection's store: no two heads share one, all come back in whatever order, contexts give back twice."""

import random

from amaranth.sim import Simulator

from nearflash.gateware.attention.control.entry_ring import EntryRing

CONTEXTS, LINES = 4, 64


def run(unit, bench):
    simulator = Simulator(unit)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()


async def take(ctx, unit, context, lines, limit_cycles=8):
    """The head's first line; None where it still waits after `limit_cycles`."""
    ctx.set(unit.i.payload, {"context": context, "lines": lines})
    ctx.set(unit.i.valid, 1)
    base = None
    for _ in range(limit_cycles):
        ready, first = (ctx.get(signal) for signal in (unit.i.ready, unit.base))
        await ctx.tick()
        if ready:
            base = first
            break
    assert ctx.get(unit.waits) == (base is None)
    ctx.set(unit.i.valid, 0)
    return base


async def give_back(ctx, unit, context, port=0):
    ctx.set(unit.give_back[port], {"valid": 1, "context": context})
    await ctx.tick()
    ctx.set(unit.give_back[port], {"valid": 0})


def test_heads_that_hold_lines_at_once_never_share_one():
    rng, unit = random.Random(1), EntryRing(CONTEXTS, LINES)

    async def bench(ctx):
        held, order, most = {}, [], 0
        for _ in range(400):
            idle = [context for context in range(CONTEXTS) if context not in held]
            # In the order of taking: lines behind the oldest head's are free only with it.
            while order and order[0][0] is None:
                order.pop(0)
            if idle and rng.random() < 0.6:
                context, lines = rng.choice(idle), rng.choice([1, 2, 7, 31, 64])
                base = await take(ctx, unit, context, lines)
                room = lines + sum(size for _, size in order) <= LINES and len(order) < CONTEXTS
                assert (base is not None) == room
                if base is not None:
                    held[context] = {(base + k) % LINES for k in range(lines)}
                    order.append((context, lines))
                    assert sum(map(len, held.values())) == len(set.union(*held.values()))
                    most = max(most, len(held))
            elif held:
                context = rng.choice(list(held))
                del held[context]
                order = [(None, size) if owner == context else (owner, size) for owner, size in order]
                await give_back(ctx, unit, context)
                if rng.random() < 0.5:  # selected, and now it ends
                    await give_back(ctx, unit, context, 1)
        assert most == CONTEXTS

    run(unit, bench)


def test_what_a_context_gave_back_before_it_takes_counts_for_nothing():
    unit = EntryRing(CONTEXTS, LINES)

    async def bench(ctx):
        await give_back(ctx, unit, 2, 1)
        assert await take(ctx, unit, 2, LINES) == 0
        assert await take(ctx, unit, 1, 1) is None
        await give_back(ctx, unit, 2)
        assert await take(ctx, unit, 1, LINES) == 0

    run(unit, bench)
