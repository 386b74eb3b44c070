import dataclasses
import random
from collections import deque

import pytest
from amaranth.sim import Simulator

from nearflash.abi.attention.faults import Fault
from nearflash.abi.kernel.config import CONFIGS
from nearflash.gateware.attention.control.contexts import ContextTable
from nearflash.gateware.attention.engine.interfaces import RequestKind

CONFIG = dataclasses.replace(CONFIGS["attend-zynq7045"], channels=3, contexts=4, gather_slots=2)


class Kernel:
    """The table's surroundings: heads with random numbers of blocks and groups, their Dones in random order."""

    def __init__(self, reactive, heads, contexts, seed, percent=60):
        self.table = ContextTable(CONFIG)
        self.sim = sim = reactive(self.table, seed, percent)
        self.rng = random.Random(seed)
        self.waiting, self.heads = deque(heads), {}
        self.finished, self.slots = [], {}
        self.most, self.slots_free, self.slots_seen, self.ready = 0, deque(), set(), deque()
        for name in ("i", "i_end__0", "i_end__1", *(f"i_done__{n}" for n in range(3)), "i_alpha", "i_finished"):
            sim.feed[name] = deque()
        sim.on = {
            "o_free": self.free, "o_slot": self.free_slot, "o_tail": self.tail, "o_dense": self.gather,
            "o_select": self.select, "o_finish": self.finish,
        }  # fmt: skip
        sim.hold = {"contexts": contexts}

    def run(self, count, **options):
        def done():
            self.sim.hold["start"] = self.sim.cycle == 0
            self.most = max(self.most, len(self.heads))
            return len(self.finished) == count

        self.sim.run(done, **options)

    def free(self, context):
        if self.waiting:
            assert context not in self.heads
            head = self.heads[context] = self.waiting.popleft()
            select = {"context": context, "group": head["group"], "entries": head["index"] + 100}
            finish = {**{k: head[k] for k in ("index", "group")}, "context": context, "faults": head.get("prepare", 0)}
            self.sim.feed["i"].append({"select": select, "finish": finish, "token": {"dense": head["dense"]}})

    def done(self, context, kind, count, faults=0):
        for k in range(count):
            self.sim.feed[f"i_done__{self.rng.randrange(3)}"].append(
                {"context": context, "kind": kind, "faults": faults if k == 0 else 0}
            )

    def tail(self, context):
        head = self.heads[context]
        for walker, kind, count in ((0, RequestKind.INDEX, head["blocks"]), (1, RequestKind.TAIL, head["tail"])):
            end = {"context": context, "kind": kind, "dones": count, "requests": 2 * count, "faults": head.get(kind, 0)}
            self.sim.feed[f"i_end__{walker}"].append(end)
            self.done(context, kind, count, head.get("done", 0))

    def select(self, command):
        head = self.heads[int(command.context)]
        assert command.entries == head["index"] + 100
        assert not any(head.get(k) for k in ("done", *RequestKind))
        self.gather(int(command.context))
        for h in range(head["group"]):
            self.sim.feed["i_alpha"].append({"context": command.context, "head": h, "faults": head.get("alpha", 0)})

    def free_slot(self, slot):
        assert slot not in self.slots_free
        self.slots_free.append(int(slot))
        self.slots_seen.add(int(slot))
        if self.ready:
            self.walk(self.ready.popleft())

    def gather(self, context):
        if self.slots_free:
            self.walk(context)
        else:
            self.ready.append(context)

    def walk(self, context):
        head = self.heads[context]
        slot = self.slots[context] = self.slots_free.popleft()
        self.done(context, RequestKind.GATHER, head["groups"])
        self.sim.feed["i_end__1"].append(
            {"context": context, "kind": RequestKind.GATHER, "dones": head["groups"], "requests": head["groups"],
             "slot": slot}
        )  # fmt: skip

    def finish(self, command):
        context = int(command.context)
        head = self.heads.pop(context)
        self.finished.append(
            {name: int(getattr(command, name)) for name in ("index", "faults", "drain", "weighed", "pages", "group")}
        )
        if command.drain:
            assert command.slot == self.slots[context]
        self.sim.feed["i_finished"].append(context)
        assert head["index"] == command.index


def heads(seed, count):
    rng = random.Random(seed)
    return [
        {"index": k, "group": rng.randrange(1, 9), "dense": rng.random() < 0.3, "blocks": rng.randrange(3),
         "tail": rng.randrange(3), "groups": rng.randrange(1, 5)}
        for k in range(count)
    ]  # fmt: skip


def expected(head, faults=0, *, gathered=True):
    dense = head["dense"]
    pages = (0 if dense else 2 * head["blocks"] + 2 * head["tail"]) + (head["groups"] if gathered else 0)
    return {"index": head["index"], "faults": faults, "drain": gathered, "weighed": gathered and not dense,
            "pages": pages, "group": head["group"]}  # fmt: skip


@pytest.mark.parametrize("seed", [0, 1, 2, pytest.param(3, marks=pytest.mark.full)])
def test_every_head_goes_its_way(reactive, seed):
    work = heads(seed, 14)
    kernel = Kernel(reactive, work, 1 << seed % 3, seed, percent=90 - 20 * seed)
    kernel.run(len(work))
    assert sorted(kernel.finished, key=lambda f: f["index"]) == [expected(head) for head in work]
    assert kernel.most <= 1 << seed % 3
    assert kernel.slots_seen == ({0, 1} if seed % 3 == 2 else {0})  # a head takes all where fewer contexts are in use


def test_faults_end_a_head_where_they_are_seen(reactive):
    work = [{**head, "dense": False, "tail": 1} for head in heads(5, 6)]
    work[0]["prepare"] = Fault.DESCRIPTOR
    work[1][RequestKind.TAIL] = Fault.ENTRY
    work[2]["done"] = Fault.UNCORRECTABLE
    work[3]["alpha"] = Fault.SCORE_RANGE
    kernel = Kernel(reactive, work, 4, 1)
    kernel.run(len(work))
    assert sorted(kernel.finished, key=lambda f: f["index"]) == [
        {**expected(work[0], Fault.DESCRIPTOR, gathered=False), "pages": 0},
        expected(work[1], Fault.ENTRY, gathered=False),
        expected(work[2], Fault.UNCORRECTABLE, gathered=False),
        expected(work[3], Fault.SCORE_RANGE),
        expected(work[4]),
        expected(work[5]),
    ]


def test_a_bus_error_marks_the_heads_that_finish_after_it(reactive):
    work = heads(6, 3)
    kernel = Kernel(reactive, work, 2, 1)
    kernel.sim.hold["memory_error"] = 1
    kernel.run(3)
    assert {f["faults"] for f in kernel.finished} == {Fault.MEMORY}


def test_the_watchdog_finishes_all_heads(reactive):
    work = [{**head, "dense": False} for head in heads(7, 6)]
    kernel = Kernel(reactive, work, 4, 1)
    kernel.sim.hold["watchdog"] = 200
    kernel.sim.on["o_tail"] = lambda context: None  # the walker hangs
    kernel.run(len(work), limit_cycles=3000)
    assert {f["faults"] for f in kernel.finished} == {Fault.WATCHDOG}
    assert not any(f["drain"] or f["weighed"] for f in kernel.finished)


def test_index_dones_give_credits_back():
    table, got = ContextTable(CONFIG), []

    async def bench(ctx):
        for context, kind in [(3, RequestKind.INDEX), (2, RequestKind.TAIL), (1, RequestKind.INDEX)]:
            ctx.set(table.i_done[2].payload, {"context": context, "kind": kind})
            ctx.set(table.i_done[2].valid, 1)
            await ctx.tick()
            ctx.set(table.i_done[2].valid, 0)
            for _ in range(8):
                _, _, valid, credit = await ctx.tick().sample(table.credit_valid, table.credit)
                if valid:
                    got.append(credit)

    simulator = Simulator(table)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()
    assert got == [{"channel": 2, "context": 3}, {"channel": 2, "context": 1}]
