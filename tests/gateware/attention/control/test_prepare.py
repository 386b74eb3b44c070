import dataclasses
import random

import numpy as np
import pytest
from amaranth.hdl import Module
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.codeword import PageTag
from nearflash.abi.attention.descriptor import DESCRIPTOR_BYTES, AttendDescriptor, Mode
from nearflash.abi.attention.faults import Fault
from nearflash.abi.attention.pages import IndexFormat, IndexLayout
from nearflash.abi.formats import fp32_bits
from nearflash.abi.kernel.config import CONFIGS
from nearflash.gateware.attention.control.entry_ring import LineTake
from nearflash.gateware.attention.control.interfaces import HeadPlan, ScanPlan
from nearflash.gateware.attention.control.prepare import Prepare
from nearflash.gateware.attention.engine.interfaces import ContextRecord, MaskBeat, ScaleWrite, query_write
from nearflash.gateware.bus.axi import Axi4ReadSignature
from nearflash.gateware.stream.queue import StreamQueue
from nearflash.model.attention.control.scan import logit_scales, top_dims
from nearflash.sim.pysim.harness import run_streams, transfer_cycles
from nearflash.sim.stalls import STALLS
from nearflash.verify.fixtures.query import query_rows
from nearflash.verify.fixtures.read_memory import WithMemory

CONFIG = CONFIGS["attend-zynq7045"]
DESCRIPTORS, QUERIES, SIZE = 0x100, 0x1000, 1 << 15
ROW = query_write(CONFIG.heads_per_beat)


class Recorded(wiring.Component):
    """Prepare with its broadcasts as streams."""

    i: In(stream.Signature(32))
    i_context: In(stream.Signature(6))
    o_lines: Out(stream.Signature(LineTake))
    o: Out(stream.Signature(HeadPlan))
    o_scan: Out(stream.Signature(ScanPlan))
    o_mask: Out(stream.Signature(MaskBeat))
    record: Out(stream.Signature(ContextRecord))
    query: Out(stream.Signature(ROW))
    scale: Out(stream.Signature(ScaleWrite))
    bus: Out(Axi4ReadSignature(64))

    def __init__(self, *, expired=False):
        self.expired = expired
        super().__init__()

    def elaborate(self, platform):
        m = Module()
        m.submodules.prepare = prepare = Prepare(CONFIG)
        m.d.comb += [prepare.descriptors_address.eq(DESCRIPTORS), prepare.contexts.eq(8)]
        m.d.comb += prepare.expired.eq(self.expired)
        for name in ("i", "i_context"):
            wiring.connect(m, wiring.flipped(getattr(self, name)), getattr(prepare, name))
        for name in ("o_lines", "o", "o_scan", "o_mask", "bus"):
            wiring.connect(m, getattr(prepare, name), wiring.flipped(getattr(self, name)))
        for name, shape in (("record", ContextRecord), ("query", ROW), ("scale", ScaleWrite)):
            queue = m.submodules[name] = StreamQueue(shape, 512, memory="block")
            m.d.comb += queue.i.payload.eq(getattr(prepare, name))
            m.d.comb += queue.i.valid.eq(getattr(prepare, f"{name}_valid"))
            wiring.connect(m, queue.o, wiring.flipped(getattr(self, name)))
        return m


@dataclasses.dataclass
class Head:
    """A descriptor, its q and the context that it will get."""

    one: AttendDescriptor
    q: np.ndarray
    index: int
    context: int

    @classmethod
    def random(cls, rng, index, **fixed):
        group, dim, dense = rng.randrange(1, 9), rng.choice([16, 64, 80, 128]), rng.random() < 0.25
        tokens, channels = rng.randrange(1, 900), rng.randrange(1, dim + 1)
        mode = Mode.DENSE | Mode.REFERENCE if dense else rng.choice([Mode(0), Mode.PAGE, Mode.REFERENCE])
        values = {
            "mode": mode, "page_tag": PageTag(rng.getrandbits(32), rng.getrandbits(16), rng.getrandbits(16)), "dim":
            dim,
            "tokens": tokens, "group": group, "score_dims": channels, "top_k": rng.randrange(1, tokens + 1),
            "local_window": rng.choice([0, 5]), "group_tokens": 8, "interleaved": rng.random() < 0.5,
            "block_tokens": 256,
            "index_format": rng.choice(list(IndexFormat)), "page_bytes": 8192, "scale": rng.uniform(0.01, 1),
            "q_address": QUERIES + 0x800 * index, "v_mean_address": 8 * rng.getrandbits(40),
            "out_address": 8 * rng.getrandbits(40), "index_table_address": 8 * rng.getrandbits(40),
            "token_table_address": 8 * rng.getrandbits(40), "top_p": 0,
            "reference": tuple(rng.randrange(-2048, 2048) for _ in range(group)) if Mode.REFERENCE in mode else (),
        } | fixed  # fmt: skip
        shape = (values["group"], values["dim"])
        q = np.random.default_rng(index).standard_normal(shape).astype(np.float16)
        return cls(AttendDescriptor(**values), q, index, rng.randrange(8))

    @property
    def scans(self):
        return Mode.DENSE not in self.one.mode

    @property
    def lines(self):
        one = self.one
        entries = -(-one.tokens // one.group_tokens) if Mode.PAGE in one.mode else one.tokens
        return {"context": self.context, "lines": -(-entries // 4) * one.group}

    @property
    def base(self):
        return self.context * CONFIG.query_rows // 8

    @property
    def chosen(self):
        return set(map(int, top_dims(self.q, self.one.score_dims))) if self.scans else set()

    @property
    def rows(self):
        return query_rows(self.q, self.chosen, CONFIG.heads_per_beat, self.base)

    @property
    def scales(self):
        if not self.scans:
            return []
        factors = logit_scales(self.q, np.array(sorted(self.chosen)), np.float32(self.one.scale)).view(np.uint32)
        return [{"context": self.context, "head": h, "scale": int(f)} for h, f in enumerate(factors)]

    @property
    def mask(self):
        last = self.one.dim // 4 - 1
        beats = range(last + 1) if self.scans else ()
        return [
            {"mask": sum(1 << k for k in range(4) if 4 * row + k in self.chosen), "last": row == last} for row in beats
        ]

    @property
    def layout(self):
        return IndexLayout(self.one.page_bytes, self.one.dim, self.one.block_tokens, self.one.index_format)

    @property
    def record(self):
        one = self.one
        return {
            "context": self.context, "page_tag": one.page_tag.sequence | one.page_tag.layer << 32 | one.page_tag.head
            << 48,
            "query_base": self.base, "dim_rows": one.dim // 4, "group": one.group, "group_tokens": one.group_tokens,
            "interleaved": one.interleaved, "block_tokens": one.block_tokens, "index_format": one.index_format,
            "index_rows": self.layout.rows, "row_codewords": self.layout.row_codewords,
            "page_codewords": one.page_bytes // 512, "limit_shift": max(one.score_dims - 1, 0).bit_length(),
            "tokens": one.tokens, "scale": fp32_bits(one.scale), "page_mode": Mode.PAGE in one.mode,
        }  # fmt: skip

    @property
    def plan(self):
        one, layout = self.one, self.layout
        n, page = one.group_tokens, Mode.PAGE in one.mode
        groups, blocks = -(-one.tokens // n), one.tokens // one.block_tokens
        entries, first = groups if page else one.tokens, max(one.tokens - one.local_window, 0)
        return {
            "scan": {
                "context": self.context, "passes": -(-one.group // CONFIG.heads_per_beat),
                "index_table": one.index_table_address, "blocks": blocks, "index_pages": layout.pages,
                "index_rows": layout.rows, "row_codewords": layout.row_codewords,
            },
            "token": {
                "token_table": one.token_table_address, "tokens": one.tokens, "groups": groups,
                "tail_group": blocks * one.block_tokens // n, "tail_tokens": one.tokens - blocks * one.block_tokens,
                "group_tokens": n, "dim_rows": one.dim // 4, "interleaved": one.interleaved,
                "page_codewords": one.page_bytes // 512, "dense": not self.scans, "page_mode": page,
                "fixed": Mode.REFERENCE in one.mode,
                "references": (*one.reference, *[0] * (8 - len(one.reference))),
            },
            "select": {
                "context": self.context, "group": one.group, "entries": entries, "tokens": one.tokens,
                "budget": min(one.top_k, entries), "probability": 0, "mass": 0,
                "local_entry": entries if one.local_window == 0 else first // n if page else first,
            },
            "finish": {
                "context": self.context, "index": self.index, "group": one.group, "dim_rows": one.dim // 4,
                "v_mean_address": one.v_mean_address, "out_address": one.out_address, "entries": entries,
            },
        }  # fmt: skip


def words(heads):
    memory = bytearray(SIZE)
    for head in heads:
        place, q = DESCRIPTORS + DESCRIPTOR_BYTES * head.index, QUERIES + 0x800 * head.index
        memory[place : place + DESCRIPTOR_BYTES] = head.one.pack()
        memory[q : q + 2 * head.q.size] = head.q.tobytes()
    return np.frombuffer(bytes(memory), np.uint64).tolist()


def run(heads, good, *, runner=run_streams, expired=False, **options):
    scans = [] if expired else [head for head in good if head.scans]
    outputs = {
        "o": len(heads), "record": len(good), "query": sum(len(h.rows) for h in good), "o_scan": len(scans),
        "scale": sum(len(h.scales) for h in good), "o_mask": sum(len(h.mask) for h in scans), "o_lines": len(scans),
    }  # fmt: skip
    inputs = {"i": [head.index for head in heads], "i_context": [head.context for head in heads]}
    dut = WithMemory(Recorded(expired=expired), words(heads), latency_cycles=options.pop("latency_cycles", 10))
    return runner(dut, inputs, outputs, timeout_cycles=2500 * len(heads), **options)


@pytest.mark.parametrize("stalls", [pytest.param("none", marks=pytest.mark.full), *list(STALLS)[1:]])
def test_every_head_is_prepared(stalls):
    rng = random.Random(f"1 {stalls}")
    heads = [Head.random(rng, index) for index in range(3)]
    got = run(heads, heads, stalls=stalls)
    assert got["o"] == [head.plan for head in heads]
    assert got["o_scan"] == [head.plan["scan"] for head in heads if head.scans]
    assert got["o_mask"] == [beat for head in heads for beat in head.mask]
    assert got["o_lines"] == [head.lines for head in heads if head.scans]
    assert got["record"] == [head.record for head in heads]
    assert got["query"] == [row for head in heads for row in head.rows]
    assert got["scale"] == [scale for head in heads for scale in head.scales]


def test_heads_with_a_fault_are_passed_on_at_once():
    rng = random.Random(9)
    heads = [Head.random(rng, index) for index in range(5)]
    bad = {"mode": Mode.PAGE, "reference": (), "block_tokens": 272, "group_tokens": 12}
    for index, change in ((0, {"dim": 6}), (2, bad)):
        heads[index].one = dataclasses.replace(heads[index].one, **change)
    heads[3].q[0, 3] = np.nan
    good = [heads[1], heads[4]]
    got = run(heads, good)
    faults = [Fault.DESCRIPTOR, 0, Fault.DESCRIPTOR, Fault.NONFINITE, 0]
    assert [(int(plan.finish.faults), int(plan.finish.index)) for plan in got["o"]] == list(
        zip(faults, range(5), strict=True)
    )
    assert [int(plan.select.context) for plan in got["o"]] == [head.context for head in heads]
    assert [got["o"][head.index] for head in good] == [head.plan for head in good]
    assert got["record"] == [head.record for head in good]


def test_after_the_watchdog_no_head_is_scanned():
    heads = [Head.random(random.Random(5), 0, mode=Mode(0), reference=())]
    assert run(heads, heads, expired=True)["o"] == [heads[0].plan]


def test_a_head_waits_for_its_lines_before_anything_of_it_is_broadcast():
    heads = [Head.random(random.Random(5), index, mode=Mode.PAGE, reference=()) for index in range(2)]
    cycles = run(heads, heads, runner=transfer_cycles, stalls="sink")
    assert all(taken < record for taken, record in zip(cycles["o_lines"], cycles["record"], strict=True))


def test_cycles_of_a_head():
    fixed = {"mode": Mode.PAGE, "reference": (), "dim": 128, "group": 4, "score_dims": 32}
    heads = [Head.random(random.Random(5), index, **fixed) for index in range(2)]
    cycles = run(heads, heads, runner=transfer_cycles, latency_cycles=60)["o"]
    assert cycles[1] - cycles[0] < 1100
