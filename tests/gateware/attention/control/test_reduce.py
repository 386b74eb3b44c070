"""Sums over channels: exact, whatever the order in which the channels have their items."""

import random

import pytest
from amaranth.hdl import Module
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.attention.control.reduce import PartialSum
from nearflash.gateware.attention.engine.interfaces import Partial
from nearflash.sim.pysim.harness import measure_latency, run_streams
from nearflash.sim.stalls import STALLS


class Taker(wiring.Component):
    """PartialSum as a stream component; its output must always be taken."""

    def __init__(self, channels):
        self.inner = PartialSum(channels)
        super().__init__(
            {"i": In(stream.Signature(Partial)).array(channels), "o": Out(stream.Signature(Partial)), "take": In(1)}
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.inner = self.inner
        for outer, own in zip(self.i, self.inner.i, strict=True):
            wiring.connect(m, wiring.flipped(outer), own)
        m.d.comb += [
            self.inner.take.eq(self.take), self.o.payload.eq(self.inner.o), self.o.valid.eq(self.inner.o_valid)
        ]  # fmt: skip
        return m


def items(rng, channels, count):
    edge = [-(1 << 94), (1 << 94) - 1, (1 << 49) - 1, 1 << 49, -1, 0]
    return [
        [{"sum": rng.choice([*edge, rng.getrandbits(96) - (1 << 95) >> rng.randrange(60)]) // 16,
          "maximum": rng.randrange(-2048, 2048)} for _ in range(count)]
        for _ in range(channels)
    ]  # fmt: skip


@pytest.mark.parametrize("stalls", ["none", "source"])
@pytest.mark.parametrize("channels", [1, 2, 3, 8])
def test_sums_and_maxima(channels, stalls):
    assert stalls in STALLS
    inputs = items(random.Random(channels), channels, 60)
    got = run_streams(
        Taker(channels), {f"i__{c}": inputs[c] for c in range(channels)}, {"o": 60}, stalls=stalls, hold={"take": 1}
    )
    want = [
        {"sum": sum(one["sum"] for one in row), "maximum": max(one["maximum"] for one in row)}
        for row in zip(*inputs, strict=True)
    ]
    assert got["o"] == want


@pytest.mark.parametrize("channels", [1, 2, 5, 8])
def test_latency(channels):
    inputs = {f"i__{c}": [{"sum": c, "maximum": 0}] for c in range(channels)}
    taker = Taker(channels)
    assert measure_latency(taker, inputs, i="i__0", hold={"take": 1}) == taker.inner.LATENCY


def test_nothing_is_taken_unasked():
    with pytest.raises(Exception, match="o waits"):
        run_streams(Taker(1), {"i__0": [{"sum": 1}]}, {"o": 1}, hold={"take": 0}, timeout_cycles=50)


def test_channels_message():
    with pytest.raises(ValueError, match="channels must be at least 1, not 0"):
        PartialSum(0)
