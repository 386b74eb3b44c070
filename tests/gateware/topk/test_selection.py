"""The selection's mask, references and sums equal the model's; contexts overlap; every mode; stalls."""

from dataclasses import dataclass

import numpy as np
import pytest
from amaranth import Module, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.config import AttendConfig
from nearflash.gateware.attn.interfaces import (
    Alpha,
    ContextRecord,
    GatherStart,
    MaskBeat,
    ScaleWrite,
    ScoreRow,
    SelectCommand,
)
from nearflash.gateware.topk.selection import Selection
from nearflash.model.num.logit import to_logit
from nearflash.model.topk.entries import entries
from nearflash.model.topk.selection import Selected, selection
from nearflash.sim.harness import run_streams

BUILD = AttendConfig(
    "test", channels=1, heads_per_beat=1, contexts=4, gather_slots=2, query_rows=64, score_blocks=1, score_entries=1024,
    selector_keys=256, units=0, page_bytes=4096, clock_hz=1,
)  # fmt: skip
_AFTER = data.StructLayout({"command": SelectCommand, "rows": 16})


class Fed(wiring.Component):
    """The selection with broadcasts as streams; scores wait for all of these, a command for the `rows` before it."""

    i_context: In(stream.Signature(ContextRecord))
    i_scale: In(stream.Signature(ScaleWrite))
    i: In(stream.Signature(ScoreRow))
    i_command: In(stream.Signature(_AFTER))
    o_start: Out(stream.Signature(GatherStart))
    o_mask: Out(stream.Signature(MaskBeat))
    o_alpha: Out(stream.Signature(Alpha))

    def __init__(self, contexts: int, scales: int) -> None:
        self._settings = contexts + scales
        super().__init__()

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.selection = unit = Selection(BUILD)
        left, rows, apart = Signal(range(self._settings + 1), init=self._settings), Signal(16), Signal(range(20))
        began = self.i_context.valid & self.i_context.ready
        m.d.sync += [left.eq(left - began - self.i_scale.valid), apart.eq(apart - (apart != 0))]
        with m.If(began):
            m.d.sync += apart.eq(16)
        moves = self.i.valid & self.i.ready
        m.d.sync += rows.eq(rows + moves)
        ready = (left == 0) & (apart == 0)
        due = rows >= self.i_command.payload.rows
        m.d.comb += [
            unit.contexts_log2.eq(2),
            unit.i_context.eq(data.View(unit.i_context.shape(), self.i_context.payload.as_value() << 1 | began)),
            unit.i_scale.eq(data.View(unit.i_scale.shape(), self.i_scale.payload.as_value() << 1 | self.i_scale.valid)),
            self.i_context.ready.eq(apart == 0),
            self.i_scale.ready.eq(1),
            unit.i.payload.eq(self.i.payload),
            unit.i.valid.eq(self.i.valid & ready),
            self.i.ready.eq(unit.i.ready & ready),
            unit.i_command.payload.eq(self.i_command.payload.command),
            unit.i_command.valid.eq(self.i_command.valid & due),
            self.i_command.ready.eq(unit.i_command.ready & due),
        ]
        for name in ("o_start", "o_mask", "o_alpha"):
            wiring.connect(m, getattr(unit, name), wiring.flipped(getattr(self, name)))
        return m


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

    def rows(self, context: int) -> list[dict[str, object]]:
        """Score rows: token groups ascending, heads, rows."""
        group, tokens = self.scores.shape
        items: list[dict[str, object]] = []
        for start in range(0, tokens, self.group_tokens):
            for head in range(group):
                held = self.scores[head, start : start + self.group_tokens].tolist()
                for place in range(0, len(held), 4):
                    four = held[place : place + 4]
                    items.append({
                        "context": context, "head": head, "row": (start + place) // 4, "last": place + 4 >= len(held),
                        "scores": four + [99] * (4 - len(four)), "valid": (1 << len(four)) - 1,
                    })  # fmt: skip
        return items

    def expected(self) -> Selected:
        found = entries(to_logit(self.scores, self.scale)[0], self.entry_tokens)
        return selection(found, self.budget, self.local_entry, probability=self.probability, mass=self.mass)


def run(heads: list[Head], stalls: str = "none") -> dict[str, list[object]]:
    """Context c is heads[c]; the scores of each come at once, and then its command."""
    records = [
        {"context": c, "group": len(h.scores), "group_tokens": h.group_tokens, "page_mode": h.page}
        for c, h in enumerate(heads)
    ]
    scales = [
        {"context": c, "head": k, "scale": int(np.float32(h.scale).view(np.uint32))}
        for c, h in enumerate(heads)
        for k in range(len(h.scores))
    ]
    rows, commands = [], []
    for context, head in enumerate(heads):
        rows += head.rows(context)
        command = {
            "context": context, "group": len(head.scores), "entries": head.entries, "tokens": head.scores.shape[1],
            "budget": head.budget, "local_entry": head.local_entry, "probability": head.probability, "mass": head.mass,
        }  # fmt: skip
        commands.append({"command": command, "rows": len(rows)})
    inputs = {"i_context": records, "i_scale": scales, "i": rows, "i_command": commands}
    outputs = {
        "o_start": len(heads),
        "o_mask": sum(-(-h.entries // 4) for h in heads),
        "o_alpha": sum(len(h.scores) for h in heads),
    }
    return run_streams(
        Fed(len(records), len(scales)), inputs, outputs, stalls=stalls, timeout_cycles=50_000, quiet_cycles=40
    )


def check(heads: list[Head], got: dict[str, list[object]]) -> None:
    masks, alphas = list(got["o_mask"]), list(got["o_alpha"])
    for context, (head, start) in enumerate(zip(heads, got["o_start"], strict=True)):
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
]


@pytest.mark.parametrize("stalls", ["none", "source", "sink", "bursty"])
def test_equals_the_model(stalls):
    check(MIXED, run(MIXED, stalls))
