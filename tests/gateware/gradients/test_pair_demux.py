import numpy as np
import pytest
from amaranth.hdl import Module
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.gradients.pair_demux import PairDemux
from nearflash.gateware.gradients.tiles import IndexRow
from nearflash.sim.stalls import STALLS
from nearflash.sim.verilator.ports import words_from_integers
from nearflash.sim.verilator.streams import StreamUnit


class Rows(wiring.Component):
    """The demux, each row's values with its indices."""

    i: In(stream.Signature(data.StructLayout({"index": IndexRow, "value": 128})))
    o_0: Out(stream.Signature(46))
    o_1: Out(stream.Signature(46))
    o_2: Out(stream.Signature(46))
    o_3: Out(stream.Signature(46))

    def elaborate(self, platform):
        m = Module()
        m.submodules.demux = demux = PairDemux()
        m.d.comb += [
            demux.i_index.payload.eq(self.i.payload.index),
            demux.i_value.payload.eq(self.i.payload.value),
            demux.i_index.valid.eq(self.i.valid),
            demux.i_value.valid.eq(self.i.valid & self.i.ready),
            self.i.ready.eq(demux.i_index.ready),
        ]
        for k in range(4):
            pairs, o = getattr(demux, f"o_{k}"), getattr(self, f"o_{k}")
            m.d.comb += [o.payload.eq(pairs.payload), o.valid.eq(pairs.valid), pairs.ready.eq(o.ready)]
        return m


@pytest.fixture(scope="module")
def unit():
    return StreamUnit(Rows(), "pair-demux")


@pytest.mark.parametrize("stalls", STALLS)
def test_deals_in_turn(unit, stalls):
    """All rows of a full tile: pair k of each leaves on stream k."""
    rng = np.random.default_rng(1)
    rows = [int.from_bytes(rng.bytes(23), "little") & (1 << 181) - 1 for _ in range(PairDemux.ROWS)]
    counts = {f"o_{k}": len(rows) for k in range(4)}
    found = unit.run({"i": words_from_integers(rows, 181)}, counts, stalls=stalls, seed=1)
    for k in range(4):
        expected = [
            row >> 12 * k & 4095
            | (row >> 48 + k & 1) << 12
            | (row >> 52 & 1) << 13
            | (row >> 53 + 32 * k & 0xFFFFFFFF) << 14
            for row in rows
        ]
        np.testing.assert_array_equal(found[f"o_{k}"], np.array(expected, np.uint64))
