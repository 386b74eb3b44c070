"""Request table: jobs of each request, pairs, and slots that come back."""

import random

from amaranth.sim import Simulator

from nearflash.gateware.nand.requests import RequestTable


def jobs_of(lun, codewords, size):
    first, second = codewords & (1 << size) - 1, codewords >> size
    return [lun] * bool(first) + [lun ^ 1] * bool(second)


def test_jobs_pairs_and_slots():
    dut = RequestTable(8, 4, tag=20)
    rng = random.Random(8)
    requests = []
    for index in range(60):
        page_log2 = rng.choice([0, 3, 5])
        size = 1 << page_log2
        codewords = rng.choice([1, 1 << size, 1 << size | 1, 1 << size - 1, (1 << 2 * size) - 1])
        requests.append(
            {
                "tag": index,
                "codewords": codewords,
                "page_log2": page_log2,
                "row": index,
                "lun": rng.randrange(8),
            }
        )
    open_jobs, open_slots, done = [], {}, []

    async def drive(ctx):
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
                ctx.set(dut.i.payload, waiting[0])
            if release is not None:
                request = open_slots.pop(release)
                assert ctx.get(dut.entry.header.tag) == request["tag"]
                assert ctx.get(dut.entry.header.codewords) == request["codewords"]
            if waiting and ctx.get(dut.i.ready):
                given.append(waiting.pop(0))
            if ctx.get(dut.jobs.valid):
                job, request = ctx.get(dut.jobs.payload), given[0]
                wanted = request.setdefault(
                    "jobs", jobs_of(request["lun"], request["codewords"], 1 << request["page_log2"])
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
