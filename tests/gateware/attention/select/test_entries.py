"""Entries of the page scorer equal the model's: page and token selection, contexts mixed, groups of every size."""

import numpy as np
import pytest
from amaranth import Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.attention.engine.interfaces import ContextRecord, ScaleWrite
from nearflash.gateware.attention.select.entries import PageScorer
from nearflash.gateware.attention.select.entry import EntryRow, Order, ScoreItem
from nearflash.model.attention.numerics.logit import to_logit
from nearflash.model.attention.select.entries import entries
from nearflash.sim.pysim.harness import run_streams

CONTEXTS, LINES = 4, 256
SCALE = np.float32(0.75)


class Fed(wiring.Component):
    """The scorer with broadcasts as streams; the scores wait until `settings` of them have come."""

    def __init__(self, settings: int) -> None:
        self._settings = settings
        self._scorer = PageScorer(CONTEXTS, LINES)
        super().__init__(
            {
                "i_context": In(stream.Signature(ContextRecord)),
                "i_scale": In(stream.Signature(ScaleWrite)),
                "i": In(stream.Signature(ScoreItem)),
                "o": Out(stream.Signature(EntryRow)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.scorer = scorer = self._scorer
        left = Signal(range(self._settings + 1), init=self._settings)
        m.d.sync += left.eq(left - self.i_context.valid - self.i_scale.valid)
        m.d.comb += [
            scorer.i_context.valid.eq(self.i_context.valid),
            scorer.i_context.record.eq(self.i_context.payload),
            scorer.i_scale.valid.eq(self.i_scale.valid),
            scorer.i_scale.write.eq(self.i_scale.payload),
            scorer.contexts_log2.eq(2),
            self.i_context.ready.eq(1),
            self.i_scale.ready.eq(1),
            scorer.i.payload.eq(self.i.payload),
            scorer.i.valid.eq(self.i.valid & (left == 0)),
            self.i.ready.eq(scorer.i.ready & (left == 0)),
            self.o.valid.eq(scorer.valid),
            self.o.payload.eq(scorer.o),
        ]
        return m


def rows(context: int, scores: np.ndarray, run_tokens: int) -> list[dict[str, object]]:
    """Score items of one context: token groups ascending, heads, rows."""
    items: list[dict[str, object]] = []
    group, tokens = scores.shape
    for start in range(0, tokens, run_tokens):
        for head in range(group):
            held = scores[head, start : start + run_tokens].tolist()
            for place in range(0, len(held), 4):
                four = held[place : place + 4]
                row = {
                    "context": context,
                    "head": head,
                    "row": (start + place) // 4,
                    "scores": four + [12345] * (4 - len(four)),
                    "valid": (1 << len(four)) - 1,
                    "last": int(place + 4 >= len(held)),
                }
                items.append({"order": Order.SCORE, "row": row})
    return items


@pytest.mark.parametrize("stalls", ["none", "source"])
@pytest.mark.parametrize(
    ("run_tokens", "page"),
    [
        *((12, 1), (16, 1), (64, 1), (4, 0)),
        *(pytest.param(*more, marks=pytest.mark.full) for more in ((4, 1), (20, 1), (16, 0))),
    ],
)
def test_equals_the_model(run_tokens, page, stalls):
    rng = np.random.default_rng(run_tokens)
    shapes = {0: (3, 75), 2: (1, 130), 3: (8, 20)}
    scores = {c: rng.integers(-(1 << 20), 1 << 20, shape) for c, shape in shapes.items()}
    records = [
        {"context": c, "group": g, "group_tokens": run_tokens, "page_mode": page} for c, (g, _) in shapes.items()
    ]
    scales = [
        {"context": c, "head": h, "scale": int(SCALE.view(np.uint32))} for c, (g, _) in shapes.items() for h in range(g)
    ]
    items = [item for c in shapes for item in rows(c, scores[c], run_tokens)]
    runs = sum(item["row"]["last"] or not page for item in items)
    inputs = {"i_context": records, "i_scale": scales, "i": items}
    got = run_streams(Fed(len(records) + len(scales)), inputs, {"o": runs}, stalls=stalls)
    found = {c: np.zeros((g, -(-s // (run_tokens if page else 1)), 2), int) for c, (g, s) in shapes.items()}
    for row in got["o"]:
        share = row.address - row.context * LINES // CONTEXTS
        line, head = divmod(share, shapes[row.context][0])
        assert head == row.head
        for lane in range(4):
            if row.mask >> lane & 1:
                entry = row.entries[lane]
                found[row.context][head, 4 * line + lane] = entry.x_max, entry.mass
        assert not row.outside
    for context, values in scores.items():
        expected = entries(to_logit(values, SCALE)[0], run_tokens if page else 1)
        np.testing.assert_array_equal(found[context][..., 0], expected.x_max)
        np.testing.assert_array_equal(found[context][..., 1], expected.mass)
