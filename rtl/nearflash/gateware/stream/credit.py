"""Credit pipeline: puts streams around a datapath that has a fixed latency and no enable.

    i ──► core_i ──► free-running datapath, `core_latency` registers ──► core_o ──► queue of `depth` ──► o
           ▲                                                                           │
           └──────────────────────── credit: a place in the queue ◄────────────────────┘

Contract: one result per item, in order. An item is issued only when a place in the queue is reserved for its result, so
the datapath never has to stop. The datapath must give on `core_o` the result of the `core_i` of exactly `core_latency`
cycles ago. Reset drops all items inside; the datapath needs no reset.

Timing: latency core_latency + Q cycles, Q that of the queue (StreamQueue.LATENCY); one item a cycle when depth >=
core_latency + Q + 1, else depth items every core_latency + Q + 1 cycles; back-pressure: yes.
i.ready and o.valid come from registers.
"""

from amaranth import Module, Mux, Signal
from amaranth.hdl import ShapeLike
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.stream.queue import QueueMemory, StreamQueue

__all__ = ["CreditPipeline"]


class CreditPipeline(wiring.Component):
    """Stream interface for a datapath of `core_latency` cycles that hangs on `core_i`, `core_valid` and `core_o`.

    Parameters
    ----------
    core_latency : cycles from `core_i` to `core_o`, at least 1.
    i_shape, o_shape : payload shapes.
    depth : places in the output queue, at least 2; None: the least for one item a cycle.
    memory : of the output queue, "distributed" or "block".

    Members
    -------
    i : In stream of `i_shape`.
    core_i : Out, operand for the datapath in this cycle, combinational from `i`.
    core_valid : Out, whether `core_i` is an item; a datapath with state looks at it, others need not.
    core_o : In, result of `core_i` of `core_latency` cycles ago.
    o : Out stream of `o_shape`.

    Raises
    ------
    ValueError : `core_latency` or `depth` too small.
    """

    def __init__(
        self,
        core_latency: int,
        i_shape: ShapeLike,
        o_shape: ShapeLike,
        *,
        depth: int | None = None,
        memory: QueueMemory = "distributed",
    ) -> None:
        if core_latency < 1:
            raise ValueError(f"core_latency must be at least 1 cycle, not {core_latency!r}")
        self.core_latency, self.o_shape, self.memory = core_latency, o_shape, memory
        #: Cycles from `i` to `o` when nothing stalls.
        self.LATENCY = core_latency + StreamQueue.LATENCY[memory]
        self.depth = self.LATENCY + 1 if depth is None else depth
        if self.depth < 2:
            raise ValueError(f"depth must be at least 2 items, not {depth!r}")
        super().__init__(
            {
                "i": In(stream.Signature(i_shape)),
                "core_i": Out(i_shape),
                "core_valid": Out(1),
                "core_o": In(o_shape),
                "o": Out(stream.Signature(o_shape)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Count the places that are neither taken nor promised."""
        m = Module()
        m.submodules.queue = queue = StreamQueue(self.o_shape, self.depth, memory=self.memory)
        credit = Signal(range(self.depth + 1), init=self.depth)
        available = Signal(init=1)  # credit != 0, from a register
        returned = Signal()
        in_flight = Signal(self.core_latency)  # bit n: the item issued n + 1 cycles ago

        # Cycle 0: issue.
        m.d.comb += [
            self.i.ready.eq(available),
            self.core_i.eq(self.i.payload),
            self.core_valid.eq(self.i.valid & available),
            returned.eq(self.o.valid & self.o.ready),
        ]
        m.d.sync += in_flight.eq((in_flight << 1) | self.core_valid)
        with m.If(self.core_valid != returned):
            m.d.sync += [credit.eq(credit + Mux(returned, 1, -1)), available.eq(returned | (credit != 1))]

        # Cycle core_latency: the result goes to its reserved place, so the queue's ready need not be looked at.
        m.d.comb += [queue.i.payload.eq(self.core_o), queue.i.valid.eq(in_flight[-1])]
        wiring.connect(m, queue.o, wiring.flipped(self.o))
        return m
