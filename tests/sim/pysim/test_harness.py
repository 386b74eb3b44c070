"""The pysim harness on components whose behaviour is known by construction, wrong ones among them."""

import random

import pytest
from amaranth.hdl import Module, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.sim.pysim.harness import measure_latency, run_streams, transfer_cycles
from nearflash.sim.stalls import STALLS, SimulationTimeout, Stall, StallPattern, UnexpectedItems

PAIR = data.StructLayout({"a": 8, "b": 4})


class Swap(wiring.Component):
    """One register: (a, b) becomes a + 256 * (b + bias). Loses item `lose`, repeats item `repeat`."""

    i: In(stream.Signature(PAIR))
    o: Out(stream.Signature(16))
    bias: In(4)

    def __init__(self, lose=None, repeat=None):
        self.lose, self.repeat = lose, repeat
        super().__init__()

    def elaborate(self, platform):
        m = Module()
        count = Signal(8)
        again = Signal()
        m.d.comb += self.i.ready.eq((self.o.ready | ~self.o.valid) & ~again)
        with m.If(self.o.ready):
            m.d.sync += [self.o.valid.eq(again), again.eq(0)]
        with m.If(self.i.valid & self.i.ready):
            m.d.sync += [
                self.o.payload.eq(self.i.payload.a + ((self.i.payload.b + self.bias) << 8)),
                self.o.valid.eq(count != self.lose if self.lose is not None else 1),
                again.eq(count == self.repeat if self.repeat is not None else 0),
                count.eq(count + 1),
            ]
        return m


class Wire(wiring.Component):
    """Combinational, with streams in an array."""

    i: In(stream.Signature(8)).array(2)
    o: Out(stream.Signature(PAIR)).array(2)

    def elaborate(self, platform):
        m = Module()
        for i, o in zip(self.i, self.o, strict=True):
            m.d.comb += [o.payload.a.eq(i.payload), o.valid.eq(i.valid), i.ready.eq(o.ready)]
        return m


ITEMS = [{"a": value, "b": value % 13} for value in range(40)]
EXPECTED = [item["a"] + 256 * (item["b"] + 2) for item in ITEMS]


@pytest.mark.parametrize("stalls", STALLS)
def test_items_arrive_under_stalls(stalls):
    assert run_streams(Swap(), {"i": ITEMS}, {"o": 40}, stalls=stalls, hold={"bias": 2})["o"] == EXPECTED


def test_integers_as_struct_bits_and_arrays_of_streams():
    result = run_streams(Wire(), {"i__0": [1, 2, 3], "i__1": [9]}, {"o__0": 3, "o__1": 1})
    assert result["o__0"] == [{"a": value, "b": 0} for value in (1, 2, 3)]
    assert [item.as_bits() for item in result["o__1"]] == [9]
    assert run_streams(Swap(), {"i": [0x305]}, {"o": 1})["o"] == [0x305]


def test_latency_and_rate_are_measured():
    assert measure_latency(Swap(), {"i": ITEMS[:1]}) == 1
    assert measure_latency(Wire(), {"i__0": [1]}, i="i__0", o="o__0") == 0
    cycles = transfer_cycles(Swap(), {"i": ITEMS}, {"o": 40})
    assert cycles["o"] == [cycle + 1 for cycle in cycles["i"]]
    assert cycles["o"][-1] - cycles["o"][0] == 39


def test_a_lost_item_is_named():
    with pytest.raises(SimulationTimeout, match=r"no end after 300 cycles: o waits for data: 39 of 40 received$"):
        run_streams(Swap(lose=7), {"i": ITEMS}, {"o": 40}, timeout_cycles=300)


def test_a_sink_that_never_takes_is_named():
    blocked = StallPattern(sink=Stall(100))
    text = "o waits for data: 0 of 40 received; i waits for ready: 1 of 40 sent"
    with pytest.raises(SimulationTimeout, match=text):
        run_streams(Swap(), {"i": ITEMS}, {"o": 40}, stalls=blocked, timeout_cycles=50)


def test_an_extra_item_is_named():
    with pytest.raises(UnexpectedItems, match="o must give 40 items, not 41"):
        run_streams(Swap(repeat=39), {"i": ITEMS}, {"o": 40})


def test_unknown_stream_and_pattern():
    with pytest.raises(ValueError, match=r"streams must be among \{'i': 'input', 'o': 'output'\}, not 'o' as an input"):
        run_streams(Swap(), {"o": ITEMS}, {})
    with pytest.raises(ValueError, match="stalls must be one of none, source, sink, both, bursty, not 'all'"):
        run_streams(Swap(), {"i": []}, {"o": 0}, stalls="all")


def test_vcd(tmp_path):
    run_streams(Swap(), {"i": ITEMS}, {"o": 40}, vcd=tmp_path / "swap.vcd")
    assert "$enddefinitions" in (tmp_path / "swap.vcd").read_text()


@pytest.mark.parametrize("stall", [Stall(10), Stall(90), Stall(50, 8), Stall(25, 4), Stall(0), Stall(100)])
def test_stall_shares(stall):
    cycles = stall.cycles(random.Random(1))
    drawn = [next(cycles) for _ in range(20000)]
    assert sum(drawn) / 200 == pytest.approx(stall.percent, abs=3)
    starts = sum(after and not before for before, after in zip([False, *drawn], drawn, strict=False))
    if stall.burst_cycles > 1:
        assert sum(drawn) / starts == pytest.approx(stall.burst_cycles, rel=0.1)


def test_bad_stalls():
    with pytest.raises(ValueError, match=r"percent must be within \[0, 100\], not 101"):
        Stall(101)
    with pytest.raises(ValueError, match="burst_cycles must be at least 1, not 0"):
        Stall(5, 0)
