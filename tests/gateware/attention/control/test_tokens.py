import dataclasses
import random

import pytest
from amaranth.hdl import Module
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.faults import Fault
from nearflash.abi.attention.pages import PageEntry, TokenLayout
from nearflash.abi.kernel.config import CONFIGS
from nearflash.gateware.attention.control.interfaces import TokenPlan, WalkEnd
from nearflash.gateware.attention.control.tokens import TokenWalker
from nearflash.gateware.attention.engine.interfaces import (
    GatherStart,
    GatherWrite,
    MaskBeat,
    RequestKind,
    RoutedRequest,
)
from nearflash.gateware.bus.axi import Axi4ReadSignature
from nearflash.gateware.stream.queue import StreamQueue
from nearflash.sim.pysim.harness import run_streams
from nearflash.sim.stalls import STALLS
from nearflash.verify.fixtures.read_memory import WithMemory

CONFIG = dataclasses.replace(CONFIGS["attend-zynq7045"], channels=3)
_WORDS = 1 << 11


class Planned(wiring.Component):
    """A token walker that has its plans from a stream, which must be empty before heads come."""

    i_plan: In(stream.Signature(TokenPlan))
    i_tail: In(stream.Signature(6))
    i_dense: In(stream.Signature(6))
    i_start: In(stream.Signature(GatherStart))
    i_mask: In(stream.Signature(MaskBeat))
    i_slot: In(stream.Signature(6))
    o_gather: Out(stream.Signature(GatherWrite))
    o: Out(stream.Signature(RoutedRequest))
    o_end: Out(stream.Signature(WalkEnd))
    bus: Out(Axi4ReadSignature(64))

    def __init__(self, plans):
        self.plans = plans
        super().__init__()

    def elaborate(self, platform):
        m = Module()
        m.submodules.walker = walker = TokenWalker(CONFIG)
        m.submodules.writes = writes = StreamQueue(GatherWrite, 8)
        m.d.comb += [
            self.i_plan.ready.eq(1), walker.plan_valid.eq(self.i_plan.valid), walker.plan.eq(self.i_plan.payload),
            writes.i.valid.eq(walker.gather_valid), writes.i.payload.eq(walker.gather),
        ]  # fmt: skip
        wiring.connect(m, writes.o, wiring.flipped(self.o_gather))
        with m.If(self.i_plan.valid):
            m.d.sync += walker.plan_context.eq(walker.plan_context + 1)
        for name in ("i_tail", "i_dense", "i_start", "i_mask", "i_slot"):
            outer, inner = getattr(self, name), getattr(walker, name)
            ready = walker.plan_context == self.plans
            m.d.comb += [inner.valid.eq(outer.valid & ready), inner.payload.eq(outer.payload)]
            m.d.comb += outer.ready.eq(inner.ready & ready)
        for name in ("o", "o_end", "bus"):
            wiring.connect(m, getattr(walker, name), wiring.flipped(getattr(self, name)))
        return m


@dataclasses.dataclass
class Head:
    """A head of random shape; `wanted` tokens."""

    context: int
    kind: str
    layout: TokenLayout
    tokens: int
    tail: int
    page_mode: bool
    wanted: set
    entries: list
    address: int = 0

    @classmethod
    def random(cls, rng, context, kind):
        page_bytes, dim, interleaved = rng.choice([4096, 16384]), rng.choice([16, 64, 80, 128]), rng.random() < 0.5
        most = TokenLayout.capacity(page_bytes, dim, interleaved)
        layout = TokenLayout(page_bytes, dim, rng.randrange(4, most + 1, 4), interleaved)
        n = layout.tokens
        tokens, page_mode = rng.randrange(1, 12 * n), rng.random() < 0.5
        groups = -(-tokens // n)
        tail = rng.randrange(groups + 1) if tokens % n == 0 else rng.randrange(groups)
        if kind == "gather":
            wanted = {t for t in range(tokens) if rng.random() < 0.1} | {tokens - 1}
            if page_mode:
                wanted = {t for t in range(tokens) if (t // n) in {w // n for w in wanted if w % 3 == 0} | {groups - 1}}
        else:
            wanted = set(range(tail * n if kind == "tail" else 0, tokens))
        entries = [
            rng.choice([PageEntry(rng.randrange(3), rng.randrange(16), rng.getrandbits(32)),
                        PageEntry(rng.randrange(3), address=8 * rng.getrandbits(30))])
            for _ in range(groups)
        ]  # fmt: skip
        return cls(context, kind, layout, tokens, tail, page_mode, wanted, entries)

    @property
    def plan(self):
        n, references = self.layout.tokens, [self.context + h - 2000 for h in range(8)]
        return {
            "token_table": self.address, "tokens": self.tokens, "groups": len(self.entries), "tail_group": self.tail,
            "tail_tokens": max(self.tokens - self.tail * n, 0), "group_tokens": n, "dim_rows": self.layout.dim // 4,
            "interleaved": self.layout.interleaved, "page_codewords": self.layout.page_codewords,
            "dense": self.kind == "dense", "page_mode": self.page_mode, "fixed": self.kind == "dense",
            "references": references,
        }  # fmt: skip

    @property
    def mask(self):
        if self.kind != "gather":
            return []
        n = self.layout.tokens
        bits = {t // n for t in self.wanted} if self.page_mode else self.wanted
        beats = -(-(len(self.entries) if self.page_mode else self.tokens) // 4)
        return [{"mask": sum((4 * b + k in bits) << k for k in range(4)), "last": b == beats - 1} for b in range(beats)]

    @property
    def requests(self):
        n, tail, found = self.layout.tokens, self.kind == "tail", []
        for group, entry in enumerate(self.entries):
            rows = [t - group * n for t in sorted(self.wanted) if t // n == group]
            if not rows:
                continue
            numbers = set()
            for row in rows:
                if tail:
                    start, end = self.layout.span(row, value=False)
                    numbers |= set(range(start // 512, (end - 1) // 512 + 1))
                else:
                    numbers |= self.layout.codewords(row)
            memory = entry.address is not None
            found.append(
                {
                    "channel": entry.channel,
                    "request": {
                        "context": self.context, "kind": RequestKind.TAIL if tail else RequestKind.GATHER,
                        "index": group, "rows": sum(1 << r for r in rows), "codewords": sum(1 << c for c in numbers),
                        "memory": memory, "address": entry.address if memory else entry.lun << 32 | entry.row,
                    },
                }
            )  # fmt: skip
        return found

    def end(self, slot=0, faults=0, requests=None):
        count = len(self.requests) if requests is None else requests
        kind = RequestKind.TAIL if self.kind == "tail" else RequestKind.GATHER
        return {
            "context": self.context,
            "kind": kind,
            "dones": count,
            "requests": count,
            "slot": slot,
            "faults": faults,
        }


def run(heads, words_of=lambda entry: entry.pack(), requests=None, **options):
    words, at = [0] * _WORDS, 1
    for head in heads:
        head.address = 8 * at
        for entry in head.entries:
            words[at] = words_of(entry)
            at += 1
    gathers = [head for head in heads if head.kind != "tail"]
    return run_streams(
        WithMemory(Planned(len(heads)), words),
        {
            "i_plan": [head.plan for head in heads],
            "i_tail": [head.context for head in heads if head.kind == "tail"],
            "i_dense": [head.context for head in heads if head.kind == "dense"],
            "i_start": [{"context": h.context, "references": range(8)} for h in heads if h.kind == "gather"],
            "i_mask": [beat for head in heads for beat in head.mask],
            "i_slot": list(range(len(gathers))),
        },
        {
            "o_gather": len(gathers), "o_end": len(heads),
            "o": sum(len(head.requests) for head in heads) if requests is None else requests,
        },
        timeout_cycles=30_000,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["tail", "dense", "gather"])
@pytest.mark.parametrize("stalls", STALLS)
def test_requests_of_every_head(stalls, kind):
    rng = random.Random(f"{kind} 1")
    heads = [Head.random(rng, context, kind) for context in range(5)]
    got = run(heads, stalls=stalls, seed=2)
    assert got["o"] == [request for head in heads for request in head.requests]
    assert got["o_end"] == [head.end(0 if kind == "tail" else slot) for slot, head in enumerate(heads)]
    references = (lambda head: head.plan["references"]) if kind == "dense" else (lambda head: list(range(8)))
    if kind != "tail":
        assert got["o_gather"] == [
            {"context": h.context, "slot": slot, "references": references(h)} for slot, h in enumerate(heads)
        ]


def test_a_bad_entry_ends_the_head():
    head = Head(0, "dense", TokenLayout(4096, 128, 8, True), 32, 0, False, set(range(32)), [PageEntry(0)] * 4)
    head.entries[2] = PageEntry(5)
    got = run([head], requests=2)
    assert got["o_end"] == [head.end(0, Fault.ENTRY, 2)]
