"""Request table: jobs of each request, pairs, and slots that come back."""

import random

from amaranth.sim import Simulator

from nearflash.gateware.attention.engine.interfaces import RequestKind
from nearflash.gateware.nand.requests import RequestTable

PAGE_CODEWORDS = {0: 8, 1: 32, 2: 1}


def jobs_of(lun, codewords, size):
    first, second = codewords & (1 << size) - 1, codewords >> size
    return [lun] * bool(first) + [lun ^ 1] * bool(second)


def test_jobs_pairs_and_slots():
    dut = RequestTable(8, 4)
    rng = random.Random(8)
    requests = []
    for index in range(60):
        context, kind = rng.randrange(3), rng.choice([RequestKind.GATHER, RequestKind.PAGE])
        size = 32 if kind is RequestKind.PAGE else PAGE_CODEWORDS[context]
        codewords = rng.choice([1, 1 << size, 1 << size | 1, 1 << size - 1, (1 << 2 * size) - 1])
        requests.append(
            {
                "context": context,
                "kind": kind,
                "index": index,
                "codewords": codewords,
                "address": rng.randrange(8) << 32 | index,
                "size": size,
            }
        )
    open_jobs, open_slots, done = [], {}, []

    async def drive(ctx):
        for context, size in PAGE_CODEWORDS.items():
            ctx.set(dut.context, {"context": context, "page_codewords": size})
            ctx.set(dut.context_valid, 1)
            await ctx.tick()
        ctx.set(dut.context_valid, 0)
        waiting, given = list(requests), []
        ctx.set(dut.jobs.ready, 1)
        ctx.set(dut.ready.ready, 1)
        for _ in range(3000):
            arrive = release = None
            if open_jobs and rng.random() < 0.4:
                arrive = open_jobs.pop(rng.randrange(len(open_jobs)))
            elif done and rng.random() < 0.5:
                release = done.pop(0)
            ctx.set(dut.slot, arrive if arrive is not None else release or 0)
            ctx.set(dut.arrive, arrive is not None)
            ctx.set(dut.release, release is not None)
            ctx.set(dut.i.valid, bool(waiting))
            if waiting:
                ctx.set(dut.i.payload, {name: value for name, value in waiting[0].items() if name != "size"})
            if release is not None:
                assert ctx.get(dut.entry.header.index) == open_slots.pop(release)["index"]
            if waiting and ctx.get(dut.i.ready):
                given.append(waiting.pop(0))
            if ctx.get(dut.jobs.valid):
                job, request = ctx.get(dut.jobs.payload), given[0]
                wanted = request.setdefault(
                    "jobs", jobs_of(request["address"] >> 32, request["codewords"], request["size"])
                )
                assert job.lun == wanted.pop(0)
                open_jobs.append(job.slot)
                open_slots[job.slot] = request
                if not wanted:
                    given.pop(0)
            if ctx.get(dut.ready.valid):
                slot = ctx.get(dut.ready.payload)
                assert slot not in open_jobs and not open_slots[slot]["jobs"]
                done.append(slot)
            await ctx.tick()
        assert not waiting and not given and not open_jobs and not open_slots

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(drive)
    simulator.run()
