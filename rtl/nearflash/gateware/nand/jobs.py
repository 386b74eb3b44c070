"""Job queues: for each lun, the requests that wait for one of its pages, in order of arrival.

All queues share one memory of `luns` x `depth` words. The queue of a lun is looked at by naming the lun; its first
job leaves when the page is through. Reset empties all queues, which takes `luns` clocks: nothing is taken meanwhile.

Timing: a job can be looked at in the clock after it was taken; `some` is combinational from `lun`; `more`, `first` and
`next` come a clock later, and belong together.
"""

from amaranth import Module, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

__all__ = ["JobQueues"]


class JobQueues(wiring.Component):
    """Queues of slot numbers.

    Parameters
    ----------
    luns : queues. depth : jobs in each, a power of two, at least 2. slot_bits : width of a slot number.

    Members
    -------
    i : In stream of {lun, slot}; waits while the lun's queue is full.
    lun : In, whose queue is looked at.
    some : Out, it holds at least one.
    more : Out, the lun looked at in the clock before held at least two.
    first, next : Out, the first and the second job of that lun.
    pop : In, the first job of `lun` leaves.

    Raises
    ------
    ValueError : `depth` is no power of two or less than 2.
    """

    def __init__(self, luns: int, depth: int, slot_bits: int) -> None:
        if depth < 2 or depth & (depth - 1):
            raise ValueError(f"depth must be a power of two, at least 2, not {depth!r}")
        self.luns, self.depth, self.slot_bits = luns, depth, slot_bits
        super().__init__(
            {
                "i": In(stream.Signature(data.StructLayout({"lun": range(luns), "slot": slot_bits}))),
                "lun": In(range(luns)),
                "some": Out(1),
                "more": Out(1),
                "first": Out(slot_bits),
                "next": Out(slot_bits),
                "pop": In(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Each lun has a count of jobs that came and one of jobs that left, both modulo 2·depth."""
        m = Module()
        bits = self.depth.bit_length()  # of a count
        m.submodules.slots = slots = Memory(shape=self.slot_bits, depth=self.luns * self.depth, init=[])
        m.submodules.came = came = Memory(shape=bits, depth=self.luns, init=[])
        m.submodules.left = left = Memory(shape=bits, depth=self.luns, init=[])
        write, write_came, write_left = slots.write_port(), came.write_port(), left.write_port()
        tail, came_here = (came.read_port(domain="comb") for _ in range(2))
        full_left, left_here = (left.read_port(domain="comb") for _ in range(2))
        clearing, clear = Signal(init=1), Signal(range(self.luns))
        with m.If(clearing):
            m.d.sync += clear.eq(clear + 1)
            with m.If(clear == self.luns - 1):
                m.d.sync += clearing.eq(0)

        # A job comes.
        job = self.i.payload
        m.d.comb += [
            tail.addr.eq(job.lun),
            full_left.addr.eq(job.lun),
            self.i.ready.eq(~clearing & ((tail.data ^ full_left.data) != self.depth)),
            write.addr.eq((job.lun << (bits - 1)) | tail.data[: bits - 1]),
            write.data.eq(job.slot),
            write.en.eq(self.i.valid & self.i.ready),
            write_came.addr.eq(job.lun),
            write_came.data.eq(tail.data + 1),
            write_came.en.eq(write.en | clearing),
        ]

        # A lun is looked at.
        held = Signal(bits)
        m.d.comb += [
            came_here.addr.eq(self.lun),
            left_here.addr.eq(self.lun),
            held.eq(came_here.data - left_here.data),
            self.some.eq(~clearing & (held != 0)),
            write_left.addr.eq(self.lun),
            write_left.data.eq(left_here.data + 1),
            write_left.en.eq(self.pop | clearing),
        ]
        m.d.sync += self.more.eq(~clearing & (held[1:] != 0))
        for place, slot in enumerate((self.first, self.next)):
            read = slots.read_port(domain="comb")
            m.d.comb += read.addr.eq((self.lun << (bits - 1)) | (left_here.data + place)[: bits - 1])
            m.d.sync += slot.eq(read.data)

        with m.If(clearing):
            m.d.comb += [port.addr.eq(clear) for port in (write_came, write_left)]
            m.d.comb += [port.data.eq(0) for port in (write_came, write_left)]
        return m
