"""Query buffer: holds q of one head group and goes over it, row by row, as often as asked.

Contract: `load` takes group · dim_rows rows from i, head by head. `walk` gives rows on o: KEYS walks over the channels,
all heads of four channels before the next four, at least 4 cycles each; WRITE over the passes of G heads, in a pass
over the channels likewise, without idle cycles.

Timing: a row a cycle; LATENCY cycles from its read to `o`; back-pressure: none on o. `busy` falls when all is out.
"""

from typing import Any

from amaranth import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.abi.formats import FP16
from nearflash.gateware.attention.engine.interfaces import HEAD_BITS
from nearflash.gateware.fp.pipeline import delay, register

__all__ = ["LANES", "MAGNITUDE_BITS", "MAGNITUDE_LSB", "ROW_BITS", "QueryBuffer", "QueryRow"]

LANES = 4
"""Elements of a row."""
ROW_BITS = 6
MAGNITUDE_LSB = 1 - FP16.bias - FP16.mantissa_bits
"""Least bit of fp16 magnitudes as integers."""
MAGNITUDE_BITS = FP16.bias + 1 - MAGNITUDE_LSB
_HEADS = 8


class QueryRow(data.Struct):
    """Channels 4·row .. 4·row + 3 of one head."""

    valid: 1
    slot: HEAD_BITS
    """Place among the heads that the walk gives together."""
    real: 1
    """There is such a head; else the row means nothing."""
    last: 1
    """Last slot of this row."""
    head: HEAD_BITS
    row: ROW_BITS
    end: 1
    """Last row of the walk's pass."""
    values: data.ArrayLayout(FP16.bits, LANES)
    magnitudes: data.ArrayLayout(MAGNITUDE_BITS, LANES)
    """|q| in units of 2^MAGNITUDE_LSB."""


class QueryBuffer(wiring.Component):
    """q of a head group.

    Parameters
    ----------
    heads_per_beat : heads of a pass, G.

    Members
    -------
    dim_rows : In, d / 4. group : In, g. They hold still while it is busy.
    load : In, pulse. walk : In, pulse with `write` : In (a WRITE walk, else KEYS). busy : Out, from the next cycle on.
    i : In stream of unsigned(64).
    o : Out, QueryRow. rows : Out, those of q, a cycle behind dim_rows and group.
    nonfinite : Out, the q last loaded holds an infinity or a NaN.
    """

    #: Cycles from the read of a row to `o`.
    LATENCY = 3

    def __init__(self, heads_per_beat: int) -> None:
        self.heads_per_beat = heads_per_beat
        super().__init__(
            {
                "dim_rows": In(7),
                "group": In(4),
                "load": In(1),
                "walk": In(1),
                "write": In(1),
                "busy": Out(1),
                "i": In(stream.Signature(FP16.bits * LANES)),
                "o": Out(QueryRow),
                "rows": Out(10),
                "nonfinite": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Read addresses come from the walk; values and magnitudes follow."""
        m = Module()
        m.submodules.rows = rows = Memory(shape=FP16.bits * LANES, depth=_HEADS << ROW_BITS, init=[])
        write, read = rows.write_port(), rows.read_port()
        tag, settle = Signal(QueryRow), Signal(range(self.LATENCY))
        loaded, last_row = Signal(10), Signal(10)
        m.d.comb += [write.addr.eq(loaded), write.data.eq(self.i.payload), write.en.eq(self.i.valid & self.i.ready)]
        # A product so small would still take a DSP block.
        m.d.sync += self.rows.eq(sum(Mux(bit, self.dim_rows << k, 0) for k, bit in enumerate(self.group)))
        m.d.sync += last_row.eq(self.rows - 1)
        finish = self._walk(m, tag, read.addr)
        with m.FSM() as fsm:
            with m.State("WAIT"):
                m.d.sync += [loaded.eq(0), settle.eq(0)]
                with m.If(self.load):
                    m.d.sync += self.nonfinite.eq(0)
                    m.next = "LOAD"
                with m.Elif(self.walk):
                    m.next = "WALK"
            with m.State("LOAD"):
                m.d.comb += self.i.ready.eq(1)
                infinite = Cat(lane[FP16.mantissa_bits : -1].all() for lane in self._lanes(self.i.payload)).any()
                with m.If(self.i.valid):
                    m.d.sync += [loaded.eq(loaded + 1), self.nonfinite.eq(self.nonfinite | infinite)]
                    with m.If(loaded == last_row):
                        m.next = "WAIT"
            with m.State("WALK"):
                m.d.comb += tag.valid.eq(1)
                with m.If(finish):
                    m.next = "SETTLE"
            with m.State("SETTLE"):
                m.d.sync += settle.eq(settle + 1)
                with m.If(settle == self.LATENCY - 1):
                    m.next = "WAIT"
        m.d.comb += self.busy.eq(~fsm.ongoing("WAIT"))

        # Cycle 0: read. Cycles 1, 2: magnitudes.
        m.d.comb += self.o.eq(delay(m, tag, self.LATENCY))
        for index, lane in enumerate(self._lanes(read.data)):
            exponent, mantissa = lane[FP16.mantissa_bits : -1], lane[: FP16.mantissa_bits]
            normal = exponent.any()
            significand = register(m, Cat(mantissa, normal))
            shift = register(m, exponent - normal)
            m.d.comb += [
                self.o.values[index].eq(delay(m, lane, self.LATENCY - 1)),
                self.o.magnitudes[index].eq(register(m, (significand << shift[:5])[:MAGNITUDE_BITS])),
            ]
        return m

    @staticmethod
    def _lanes(row: Signal) -> list[Any]:
        return [row.word_select(lane, FP16.bits) for lane in range(LANES)]

    def _walk(self, m: Module, tag: Any, address: Signal) -> Signal:
        """Slots inside rows inside passes; a head is dim_rows rows away from the one before. True with the last."""
        slot, row, head = Signal(HEAD_BITS), Signal(ROW_BITS), Signal(4)  # head: first of the pass
        start, place, slots = Signal(9), Signal(9), Signal(4)  # addresses: of the pass, of the row at hand
        left = Signal(4)  # heads from the pass on
        most = self.heads_per_beat
        m.d.comb += [
            slots.eq(Mux(self._writing(m), Mux(left < most, left, most), Mux(self.group < LANES, LANES, self.group))),
            address.eq(place),
            tag.slot.eq(slot),
            tag.real.eq(slot < left),
            tag.last.eq(slot == slots - 1),
            tag.head.eq(head + slot),
            tag.row.eq(row),
            tag.end.eq(row == self.dim_rows - 1),
        ]
        finish = Signal()
        m.d.comb += finish.eq(tag.valid & tag.last & tag.end & (~self._write | (left <= most)))
        with m.If(tag.valid):
            m.d.sync += [slot.eq(slot + 1), place.eq(place + self.dim_rows)]
            with m.If(tag.last):
                m.d.sync += [slot.eq(0), row.eq(row + 1), place.eq(start + row + 1)]
            with m.If(tag.last & tag.end):
                following = start + most * self.dim_rows
                m.d.sync += [row.eq(0), head.eq(head + most), left.eq(left - most)]
                m.d.sync += [start.eq(following), place.eq(following)]
        with m.Else():
            m.d.sync += [slot.eq(0), row.eq(0), head.eq(0), left.eq(self.group), start.eq(0), place.eq(0)]
        return finish

    def _writing(self, m: Module) -> Signal:
        """The kind of the walk, from its start on."""
        self._write = Signal()
        with m.If(self.walk):
            m.d.sync += self._write.eq(self.write)
        return self._write
