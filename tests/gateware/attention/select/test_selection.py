"""The selection's mask, references and sums equal the model's; contexts overlap; masks wait; modes; stalls."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from amaranth import C, Cat, Module, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.faults import Fault
from nearflash.abi.kernel.config import AttendConfig
from nearflash.gateware.attention.engine.interfaces import (
    Alpha,
    ContextRecord,
    GatherStart,
    MaskBeat,
    ScaleWrite,
    ScoreRow,
    SelectCommand,
)
from nearflash.gateware.attention.select.selection import Selection
from nearflash.model.attention.numerics.logit import to_logit
from nearflash.model.attention.select.entries import entries
from nearflash.model.attention.select.selection import Selected, selection
from nearflash.sim.pysim.harness import run_streams

BUILD = AttendConfig(
    "test", channels=1, heads_per_beat=1, contexts=4, gather_slots=2, query_rows=64, score_blocks=1, score_entries=1024,
    selector_keys=256, luns=0, page_bytes=4096, clock_hz=1,
)  # fmt: skip
QUEUED = replace(BUILD, mask_beats=64)
_LINES_A_HEAD = 72
"""Of the store's 256, by which the first lines of heads lie apart: three heads, and no power of two."""
_KINDS = (ContextRecord, ScaleWrite, ScoreRow, SelectCommand)
_BITS = max(kind.as_shape().size for kind in _KINDS)


class Fed(wiring.Component):
    """The selection with one stream for all that it is told, in that order; no start or mask is taken before so many
    items of `o_alpha`."""

    i: In(stream.Signature(data.StructLayout({"kind": 2, "bits": _BITS})))
    o_start: Out(stream.Signature(GatherStart))
    o_mask: Out(stream.Signature(MaskBeat))
    o_alpha: Out(stream.Signature(Alpha))

    def __init__(self, build: AttendConfig, alphas_first: int = 0) -> None:
        self.build, self.alphas_first = build, alphas_first
        super().__init__()

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.selection = unit = Selection(self.build)
        apart, bits, kind = Signal(range(20)), self.i.payload.bits, self.i.payload.kind
        m.d.sync += apart.eq(apart - (apart != 0))
        m.d.comb += [unit.contexts_log2.eq(2), *(port.payload.eq(bits) for port in (unit.i, unit.i_command))]
        with m.If(self.i.valid):
            with m.Switch(kind):
                with m.Case(0):
                    m.d.comb += [self.i.ready.eq(apart == 0), unit.i_context.eq(bits << 1 | (apart == 0))]
                    with m.If(apart == 0):
                        m.d.sync += apart.eq(16)
                        if self.build.mask_beats:
                            line = Signal.like(unit.i_base.line)
                            m.d.sync += line.eq(line + _LINES_A_HEAD)
                            m.d.comb += unit.i_base.eq(Cat(C(1), ContextRecord(bits).context, line))
                with m.Case(1):
                    m.d.comb += [self.i.ready.eq(1), unit.i_scale.eq(bits << 1 | 1)]
                with m.Case(2):
                    m.d.comb += [unit.i.valid.eq(1), self.i.ready.eq(unit.i.ready)]
                with m.Case(3):
                    m.d.comb += [unit.i_command.valid.eq(1), self.i.ready.eq(unit.i_command.ready)]
        left = Signal(range(self.alphas_first + 1), init=self.alphas_first)
        wiring.connect(m, unit.o_alpha, wiring.flipped(self.o_alpha))
        with m.If(self.o_alpha.valid & self.o_alpha.ready & (left != 0)):
            m.d.sync += left.eq(left - 1)
        for name in ("o_start", "o_mask"):
            source, sink = getattr(unit, name), getattr(self, name)
            m.d.comb += [
                sink.payload.eq(source.payload),
                sink.valid.eq(source.valid & (left == 0)),
                source.ready.eq(sink.ready & (left == 0)),
            ]
        return m


def told(kind: type, **fields: object) -> dict[str, int]:
    """An item of Fed's input."""
    return {"kind": _KINDS.index(kind), "bits": Value.cast(kind.const(fields)).value}


@dataclass
class Head:
    """One context: its scores (g, S) and its command."""

    scores: np.ndarray
    budget: int
    local: int = 2
    page: bool = True
    group_tokens: int = 16
    probability: bool = False
    mass: int = 0
    scale: float = 0.0625

    @property
    def entry_tokens(self) -> int:
        return self.group_tokens if self.page else 1

    @property
    def entries(self) -> int:
        return -(-self.scores.shape[1] // self.entry_tokens)

    @property
    def local_entry(self) -> int:
        return max(self.scores.shape[1] - self.local, 0) // self.entry_tokens

    def begin(self, context: int) -> list[dict[str, int]]:
        """The context's record and its scales."""
        group, scale = len(self.scores), int(np.float32(self.scale).view(np.uint32))
        record = told(ContextRecord, context=context, group=group, group_tokens=self.group_tokens, page_mode=self.page)
        return [record, *(told(ScaleWrite, context=context, head=head, scale=scale) for head in range(group))]

    def rows(self, context: int) -> list[dict[str, int]]:
        """Score rows: token groups ascending, heads, rows."""
        group, tokens = self.scores.shape
        items: list[dict[str, int]] = []
        for start in range(0, tokens, self.group_tokens):
            for head in range(group):
                held = self.scores[head, start : start + self.group_tokens].tolist()
                for place in range(0, len(held), 4):
                    four = held[place : place + 4]
                    items.append(told(
                        ScoreRow, context=context, head=head, row=(start + place) // 4, last=place + 4 >= len(held),
                        scores=four + [99] * (4 - len(four)), valid=(1 << len(four)) - 1,
                    ))  # fmt: skip
        return items

    def command(self, context: int) -> dict[str, int]:
        return told(
            SelectCommand, context=context, group=len(self.scores), entries=self.entries, tokens=self.scores.shape[1],
            budget=self.budget, local_entry=self.local_entry, probability=self.probability, mass=self.mass,
        )  # fmt: skip

    def expected(self) -> Selected:
        found = entries(to_logit(self.scores, self.scale)[0], self.entry_tokens)
        return selection(found, self.budget, self.local_entry, probability=self.probability, mass=self.mass)


def run(
    heads: list[Head], stalls: str = "none", build: AttendConfig = BUILD, alphas_first: int = 0
) -> dict[str, list[object]]:
    """Head c goes to context c mod 4, which begins once head c - 2 is selected; its scores come meanwhile."""
    items: list[dict[str, int]] = []
    for number, head in enumerate(heads):
        items += [*head.begin(number % 4), *head.rows(number % 4), head.command(number % 4)]
    outputs = {
        "o_start": len(heads),
        "o_mask": sum(-(-h.entries // 4) for h in heads),
        "o_alpha": sum(len(h.scores) for h in heads),
    }
    options = {"stalls": stalls, "timeout_cycles": 50_000, "quiet_cycles": 40}
    return run_streams(Fed(build, alphas_first), {"i": items}, outputs, **options)


def check(heads: list[Head], got: dict[str, list[object]]) -> None:
    masks, alphas = list(got["o_mask"]), list(got["o_alpha"])
    for number, (head, start) in enumerate(zip(heads, got["o_start"], strict=True)):
        context = number % 4
        expected = head.expected()
        beats = [masks.pop(0) for _ in range(-(-head.entries // 4))]
        assert [beat.last for beat in beats] == [0] * (len(beats) - 1) + [1]
        bits = [bool(beat.mask >> lane & 1) for beat in beats for lane in range(4)]
        assert bits == expected.mask.tolist() + [False] * (len(bits) - head.entries)
        assert start.context == context
        assert tuple(start.references)[: len(head.scores)] == expected.references
        for k in range(len(head.scores)):
            alpha = alphas.pop(0)
            assert (alpha.context, alpha.head, alpha.selected) == (context, k, expected.mask.sum())
            assert (alpha.numerator, alpha.denominator) == (expected.numerator[k], expected.denominator[k])
            assert alpha.faults == 0
    assert not masks
    assert not alphas


def scores(group: int, tokens: int, seed: int, deviation: float = 40.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(0, deviation, (group, tokens)) * 65536).astype(np.int64)


MIXED = [
    Head(scores(3, 200, 1), 5),
    Head(scores(2, 130, 2), 9, probability=True, group_tokens=12),
    Head(scores(1, 90, 3), 20, page=False),
    Head(scores(2, 61, 4), 40, page=False, probability=True, mass=0xC000),
    Head(scores(8, 100, 5, deviation=9.0) - (1 << 24), 3, group_tokens=64, probability=True),
]
"""The last one has a context for the second time, with much smaller logits."""


@pytest.mark.parametrize(
    ("stalls", "build"),
    [
        ("none", QUEUED),
        pytest.param("none", BUILD, marks=pytest.mark.full),
        ("source", BUILD),
        ("sink", QUEUED),
        ("bursty", BUILD),
    ],
)
def test_equals_the_model(stalls, build):
    heads = MIXED if stalls == "none" else MIXED[1::2]
    check(heads, run(heads, stalls, build))


def test_selections_go_on_while_masks_wait():
    heads = MIXED[1:4]
    check(heads, run(heads, build=QUEUED, alphas_first=sum(len(head.scores) for head in heads)))


def test_equal_scores_and_the_smallest_sizes():
    heads = [
        Head(np.zeros((2, 1), np.int64), 1, page=False, local=1, probability=True, mass=1),
        Head(np.full((2, 64), 1 << 20), 7, page=False, local=1, probability=True),
        Head(np.full((4, 64), -(1 << 20)), 2, group_tokens=4, local=0),
        Head(scores(1, 250, 8), 500, page=False, local=250),
    ]
    check(heads, run(heads))


def test_a_logit_out_of_range_is_a_fault_of_its_context_only():
    large = scores(2, 64, 9)
    large[1, 37] = (1 << 35) - 1
    heads = [Head(scores(1, 4, 10), 1), Head(large, 2), Head(scores(1, 4, 11), 1)]
    got = run(heads)
    assert [alpha.faults for alpha in got["o_alpha"]] == [0, Fault.SCORE_RANGE, Fault.SCORE_RANGE, 0]
    assert list(got["o_start"][1].references)[:2] == list(heads[1].expected().references)
