"""Drain of sums: reads what a channel has summed up for a head, in the order of `Partial`, and gives the slot back.

Timing: one partial sum a cycle while the lanes have a cycle free; the weight unit is held until the totals are read;
back-pressure: yes.
"""

from amaranth import Array, Module, Mux, Signal
from amaranth.hdl import signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.fixed_point import PV_BITS
from nearflash.gateware.attention.engine.interfaces import SLOT_BITS, DrainCommand, Partial
from nearflash.gateware.attention.engine.issue import MemoryRead
from nearflash.gateware.attention.engine.weight import TOTAL
from nearflash.gateware.fp.pipeline import delay, register, wire
from nearflash.gateware.stream.queue import StreamQueue

__all__ = ["SumDrain"]

_PLACES = 32
_P_TO_SUM_BITS = 24  # from units of 2^-24 to 2^-48
_MAXIMUM_LEAST = -(1 << 11)


class SumDrain(wiring.Component):
    """Walks heads, rows and lanes of a slot.

    Parameters: heads (G), slots, slot_rows (a power of two).
    Members
    -------
    i : In stream of DrainCommand. o : Out stream of Partial.
    fresh : In, a bit for each slot: it has no sums. renew : Out, {valid, slot}: the slot's sums have been read.
    hold, total_address : Out, weight_busy, total : In, of the weight unit.
    o_read : Out stream of MemoryRead; sum : In, {valid, value}: what they read, in order.
    """

    def __init__(self, heads: int, slots: int, slot_rows: int) -> None:
        self._heads, self._slot_rows = heads, slot_rows
        super().__init__(
            {
                "i": In(stream.Signature(DrainCommand)),
                "o": Out(stream.Signature(Partial)),
                "fresh": In(slots),
                "renew": Out(data.StructLayout({"valid": 1, "slot": SLOT_BITS})),
                "hold": Out(1),
                "total_address": Out(9),
                "weight_busy": In(1),
                "total": In(TOTAL),
                "o_read": Out(stream.Signature(MemoryRead)),
                "sum": In(data.StructLayout({"valid": 1, "value": signed(PV_BITS)})),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Totals first, head by head; then the sums, each read reserving a place in the queue."""
        m = Module()
        m.submodules.queue = queue = StreamQueue(Partial, _PLACES)
        wiring.connect(m, queue.o, wiring.flipped(self.o))
        command, head, places = Signal(DrainCommand), Signal(3), Signal(range(_PLACES + 1), init=_PLACES)
        fresh, room, reserve = Signal(), Signal(), Signal()
        m.d.comb += self.total_address.eq(head + (command.slot << 3))
        m.d.sync += [room.eq(places > 1), self.renew.valid.eq(0)]  # room: a cycle late, so one is left when it says so
        m.d.sync += places.eq(places - reserve + (self.o.valid & self.o.ready))
        self._last_row = register(m, (command.dim_rows - 1)[:7])
        total_valid, last_head = Signal(), wire(m, head == register(m, (command.group - 1)[:4]))
        with m.FSM():
            with m.State("WAIT-COMMAND"):
                m.d.comb += self.i.ready.eq(1)
                m.d.sync += [command.eq(self.i.payload), fresh.eq(Array(self.fresh)[self.i.payload.slot]), head.eq(0)]
                with m.If(self.i.valid):
                    m.next = "WAIT-WEIGHTS"
            with m.State("WAIT-WEIGHTS"):
                m.d.comb += self.hold.eq(1)
                # Sums of the drain before must all be in the queue: totals come at once.
                with m.If(~self.weight_busy & (places + queue.level == _PLACES)):
                    m.next = "READ-TOTALS"
            with m.State("READ-TOTALS"):
                m.d.comb += [self.hold.eq(1), total_valid.eq(room), reserve.eq(room)]
                with m.If(room):
                    m.d.sync += head.eq(Mux(last_head, 0, head + 1))
                    with m.If(last_head):
                        m.next = "READ-SUMS"
            with m.State("READ-SUMS"):
                m.d.comb += [self.o_read.valid.eq(room), reserve.eq(room & self.o_read.ready)]
                with m.If(self._walk(m, command, head, last_head, fresh, reserve)):
                    m.d.sync += [self.renew.valid.eq(1), self.renew.slot.eq(command.slot)]
                    m.next = "WAIT-COMMAND"

        from_total = delay(m, total_valid, 1)
        least = wire(m, Mux(fresh, _MAXIMUM_LEAST, self.total.maximum).as_signed())
        m.d.comb += [
            queue.i.valid.eq(from_total | self.sum.valid),
            queue.i.payload.sum.eq(self.sum.value),
            queue.i.payload.maximum.eq(least),
        ]
        with m.If(from_total):
            m.d.comb += queue.i.payload.sum.eq(Mux(fresh, 0, self.total.sum << _P_TO_SUM_BITS))
        return m

    def _walk(
        self, m: Module, command: data.View, head: Signal, last_head: Signal, fresh: Signal, step: Signal
    ) -> Signal:
        """Address and element of the next sum; whether it is the last one."""
        lane, row, place, offset = Signal(2), Signal(7), Signal(range(self._heads)), Signal(9)
        row_end = wire(m, row == self._last_row)
        head_end = wire(m, step & (lane == 3) & row_end)
        read = self.o_read.payload
        m.d.comb += [
            read.address.eq((command.slot << (self._slot_rows - 1).bit_length()) + offset + row),
            read.element.eq(lane + (place << 2)),
            read.fresh.eq(fresh),
        ]
        with m.If(step):
            m.d.sync += lane.eq(lane + 1)
            with m.If(lane == 3):
                m.d.sync += row.eq(Mux(row_end, 0, row + 1))
        with m.If(head_end):
            m.d.sync += head.eq(head + 1)
            set_end = wire(m, place == self._heads - 1)
            m.d.sync += place.eq(Mux(set_end | last_head, 0, place + 1))
            m.d.sync += offset.eq(Mux(last_head, 0, offset + Mux(set_end, command.dim_rows, 0)))
        return wire(m, head_end & last_head)
