"""Score rows of several channels: whole groups, each channel's in order."""

import random
from itertools import groupby

import pytest
from amaranth.hdl import Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.attention.control.scores import ScoreArbiter
from nearflash.gateware.attention.engine.interfaces import ContextRecord, ScoreRow
from nearflash.sim.pysim.harness import measure_latency, run_streams
from nearflash.sim.stalls import STALLS

GROUPS = {0: 1, 1: 3, 2: 8, 3: 2}


class Arbiter(wiring.Component):
    """The arbiter behind its broadcast, as streams."""

    def __init__(self, channels):
        self.inner = ScoreArbiter(channels, len(GROUPS))
        row = stream.Signature(ScoreRow)
        super().__init__({"context": In(stream.Signature(ContextRecord)), "i": In(row).array(channels), "o": Out(row)})

    def elaborate(self, platform):
        m = Module()
        m.submodules.inner = inner = self.inner
        seen = Signal(range(len(GROUPS) + 1))
        with m.If(self.context.valid):
            m.d.sync += seen.eq(seen + 1)
        for outer, own in zip(self.i, inner.i, strict=True):  # rows come when all contexts have
            known = seen == len(GROUPS)
            m.d.comb += [own.payload.eq(outer.payload), own.valid.eq(outer.valid & known)]
            m.d.comb += outer.ready.eq(own.ready & known)
        wiring.connect(m, inner.o, wiring.flipped(self.o))
        m.d.comb += [self.context.ready.eq(1), inner.i_context.valid.eq(self.context.valid)]
        m.d.comb += inner.i_context.record.eq(self.context.payload)
        return m


def group(rng, channel, number):
    context, rows = rng.choice(list(GROUPS)), rng.randrange(1, 4)
    return [
        {"context": context, "head": head, "row": row, "scores": [channel, number, 0, -1], "valid": 15,
         "last": row == rows - 1}
        for head in range(GROUPS[context]) for row in range(rows)
    ]  # fmt: skip


CONTEXTS = [{"context": context, "group": size} for context, size in GROUPS.items()]


@pytest.mark.parametrize("stalls", STALLS)
@pytest.mark.parametrize("channels", [1, 3])
def test_groups_stay_whole(channels, stalls):
    rng = random.Random(channels)
    groups = [[group(rng, channel, number) for number in range(12)] for channel in range(channels)]
    inputs = {f"i__{c}": [row for one in groups[c] for row in one] for c in range(channels)}
    count = sum(map(len, inputs.values()))
    got = run_streams(Arbiter(channels), {"context": CONTEXTS, **inputs}, {"o": count}, stalls=stalls)["o"]
    seen = [[row for row in got if row.scores[0] == channel] for channel in range(channels)]
    assert seen == [inputs[f"i__{c}"] for c in range(channels)]
    runs = [key for key, _ in groupby((row.scores[0], row.scores[1]) for row in got)]
    assert len(runs) == len(set(runs)) == 12 * channels


def test_channels_take_turns():
    rows = {f"i__{c}": [{"context": 0, "last": 1, "scores": [c, 0, 0, 0]}] * 8 for c in range(3)}
    got = run_streams(Arbiter(3), {"context": CONTEXTS, **rows}, {"o": 24})["o"]
    assert [row.scores[0] for row in got] == [1, 2, 0] * 8


def test_latency():
    row = {"context": 0, "last": 1}
    assert measure_latency(Arbiter(2), {"context": CONTEXTS, "i__1": [row]}, i="i__1") == ScoreArbiter.LATENCY


def test_channels_message():
    with pytest.raises(ValueError, match="channels must be at least 1, not 0"):
        ScoreArbiter(0, 4)
