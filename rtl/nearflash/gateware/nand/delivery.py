"""Delivery: puts number, place and page tag's address to the beats of each run of codewords.

Contract: a run is taken when the former one has gone out. A run whose lun `failed` gives as many codewords of zeros,
marked, without any data from the link.

Timing: latency 0 cycles from `read` to `o` (combinational, and from o.ready to read.ready); one beat a cycle.
"""

from amaranth import Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.nand.link import RAW_BEATS, RawBeat
from nearflash.gateware.nand.runs import CodewordRun

__all__ = ["Delivery", "PlacedRun"]


class PlacedRun(data.Struct):
    """A run of codewords of the page at (lun, row)."""

    run: CodewordRun
    lun: 8
    row: 32
    failed: 1


class Delivery(wiring.Component):
    """Beats to raw codewords.

    Members
    -------
    i : In stream of PlacedRun.
    read : In stream of 64 bits: the page's bytes from the run's first codeword on.
    o : Out stream of RawBeat.
    """

    i: In(stream.Signature(PlacedRun))
    read: In(stream.Signature(64))
    o: Out(stream.Signature(RawBeat))

    def elaborate(self, platform: object) -> Module:
        """Count beats and codewords."""
        m = Module()
        run = Signal(PlacedRun)
        active, beat, moves = Signal(), Signal(range(RAW_BEATS)), Signal()
        only = Signal()  # this is the run's last codeword
        m.d.comb += [
            self.i.ready.eq(~active),
            # A failed run has no data to wait for; it gives zeros, so that counts downstream hold.
            self.o.valid.eq(active & (self.read.valid | run.failed)),
            self.read.ready.eq(active & self.o.ready & ~run.failed),
            moves.eq(self.o.valid & self.o.ready),
            only.eq(run.run.count == 1),
            self.o.payload.data.eq(Mux(run.failed, 0, self.read.payload)),
            self.o.payload.first.eq(beat == 0),
            self.o.payload.last.eq(beat == RAW_BEATS - 1),
            self.o.payload.final.eq(run.run.last & only),
            self.o.payload.number.eq(run.run.number),
            self.o.payload.place.eq(run.run.place),
            *(self.o.payload[name].eq(run[name]) for name in ("lun", "row", "failed")),
        ]
        # Loaded whenever it is free: `active` alone says whether that was an item.
        with m.If(self.i.ready):
            m.d.sync += [run.eq(self.i.payload), active.eq(self.i.valid)]
        with m.If(moves):
            m.d.sync += beat.eq(beat + 1)
            with m.If(self.o.payload.last):
                m.d.sync += [beat.eq(0), run.run.count.eq(run.run.count - 1), active.eq(~only)]
                m.d.sync += [run.run.number.eq(run.run.number + 1), run.run.place.eq(run.run.place + 1)]
        return m
