"""StreamUnit must give what the pysim harness gives, and fail as it fails."""

import numpy as np
import pytest
from amaranth.hdl import Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.sim.pysim.harness import run_streams
from nearflash.sim.stalls import STALLS, SimulationTimeout, Stall, StallPattern, UnexpectedItems
from nearflash.sim.verilator.ports import integers_from_words, words_from_integers
from nearflash.sim.verilator.streams import StreamUnit


class Sums(wiring.Component):
    """Item by item: sum = a + b + bias, wide = a * 2^64 + b; takes one of each input, gives one on each output."""

    i_a: In(stream.Signature(8))
    i_b: In(stream.Signature(40))
    o_sum: Out(stream.Signature(41))
    o_wide: Out(stream.Signature(72))
    bias: In(4)

    def elaborate(self, platform):
        m = Module()
        free, step = Signal(), Signal()
        m.d.comb += [
            free.eq((self.o_sum.ready | ~self.o_sum.valid) & (self.o_wide.ready | ~self.o_wide.valid)),
            step.eq(free & self.i_a.valid & self.i_b.valid),
            self.i_a.ready.eq(step),
            self.i_b.ready.eq(step),
        ]
        for o in (self.o_sum, self.o_wide):
            with m.If(o.ready):
                m.d.sync += o.valid.eq(0)
            with m.If(step):
                m.d.sync += o.valid.eq(1)
        with m.If(step):
            m.d.sync += [
                self.o_sum.payload.eq(self.i_a.payload + self.i_b.payload + self.bias),
                self.o_wide.payload.eq((self.i_a.payload << 64) | self.i_b.payload),
            ]
        return m


class Kept(wiring.Component):
    """Gives once, in cycle 4, what it last took, before the last reset too."""

    i: In(stream.Signature(8))
    o: Out(stream.Signature(8))

    def elaborate(self, platform):
        m = Module()
        kept, cycle = Signal(8, reset_less=True), Signal(3)
        m.d.comb += [self.i.ready.eq(1), self.o.payload.eq(kept), self.o.valid.eq(cycle == 4)]
        with m.If(self.i.valid):
            m.d.sync += kept.eq(self.i.payload)
        with m.If(cycle < 5):
            m.d.sync += cycle.eq(cycle + 1)
        return m


@pytest.fixture(scope="module")
def sums():
    return StreamUnit(Sums(), "test_sums")


@pytest.mark.parametrize("stalls", STALLS)
def test_equals_pysim(sums, stalls):
    rng = np.random.default_rng(3)
    a, b = rng.integers(0, 256, 100), rng.integers(0, 1 << 40, 100)
    result = sums.run({"i_a": a, "i_b": b}, {"o_sum": 100, "o_wide": 100}, stalls=stalls, seed=5, hold={"bias": 9})
    same = run_streams(
        Sums(), {"i_a": a.tolist(), "i_b": b.tolist()}, {"o_sum": 100, "o_wide": 100}, stalls=stalls, hold={"bias": 9}
    )
    assert result["o_sum"].tolist() == same["o_sum"] == (a + b + 9).tolist()
    assert integers_from_words(result["o_wide"]) == same["o_wide"]


def test_stalls_cost_cycles(sums):
    items = {"i_a": np.zeros(1000, int), "i_b": np.zeros(1000, int)}
    cycles = {}
    for percent in (0, 50, 90):
        sums.run(items, {"o_sum": 1000, "o_wide": 1000}, stalls=StallPattern(source=Stall(percent)))
        cycles[percent] = sums.cycles
    assert cycles[0] == 1000 + 1 + 16
    # Both inputs must be there: the wait for the later of two geometric draws.
    assert cycles[50] == pytest.approx(1000 * (2 + 2 - 1 / 0.75), rel=0.05)
    assert cycles[90] == pytest.approx(1000 * (10 + 10 - 1 / 0.19), rel=0.1)


def test_a_new_model_has_forgotten_the_old_ones_memory():
    unit = StreamUnit(Kept(), "test_kept")
    assert [unit.run({"i": items}, {"o": 1})["o"][0] for items in ([7], [])] == [7, 7]
    unit.reset_model()
    assert unit.run({"i": []}, {"o": 1})["o"][0] == 0


def test_one_stream_may_stall_alone(sums):
    items = {"i_a": np.zeros(1000, int), "i_b": np.zeros(1000, int)}
    late = StallPattern(named={"i_b": Stall(50)})
    sums.run(items, {"o_sum": 1000, "o_wide": 1000}, stalls=late)
    assert sums.cycles == pytest.approx(2000, rel=0.05)
    pysim = run_streams(Sums(), {"i_a": [1] * 40, "i_b": [2] * 40}, {"o_sum": 40, "o_wide": 40}, stalls=late)
    assert len(pysim["o_sum"]) == 40


def test_waiting_streams_are_named(sums):
    text = (
        "no end after 500 cycles: o_sum waits for data: 7 of 9 received; o_wide .*; i_a waits for ready: 7 of 9 sent$"
    )
    with pytest.raises(SimulationTimeout, match=text):
        sums.run({"i_a": range(9), "i_b": range(7)}, {"o_sum": 9, "o_wide": 9}, timeout_cycles=500)
    with pytest.raises(UnexpectedItems, match="o_wide must give 3 items, not 4"):
        sums.run({"i_a": range(4), "i_b": range(4)}, {"o_sum": 4, "o_wide": 3})
    # A run that failed leaves nothing behind.
    assert sums.run({"i_a": [1], "i_b": [2]}, {"o_sum": 1, "o_wide": 1})["o_sum"].tolist() == [3]


def test_bad_streams(sums):
    with pytest.raises(ValueError, match=r"input streams must be among \['i_a', 'i_b'\], not \['o_sum'\]"):
        sums.run({"o_sum": [1]}, {})
    with pytest.raises(ValueError, match=r"input `i_a__payload` must be within \[0, 255\], not \[256, 256\]"):
        sums.run({"i_a": [256]}, {})


def test_wide_words():
    values = [0, 1 << 71, (1 << 72) - 1, 0x123456789ABCDEF012]
    assert integers_from_words(words_from_integers(values, 72)) == values
    assert integers_from_words(words_from_integers([-1, 5], 72), 72) == [-1, 5]
