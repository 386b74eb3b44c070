"""Stream queue: `amaranth.lib.fifo` between two streams, in distributed or in block RAM.

Contract: items leave in order, none lost, none invented. Neither `o.valid` nor `i.ready` depends combinationally on the
other side. Reset empties it; the memory keeps its words, which cannot be seen any more.

Timing: latency `LATENCY[memory]` cycles; one item a cycle; back-pressure: yes, after `depth` items.
Limits: block RAM has a synchronous read port, so one of the `depth` items sits in its output register; a depth of
2**k + 1 fills a memory of 2**k words.
"""

from typing import Literal, get_args

from amaranth import Module, Shape
from amaranth.hdl import ShapeLike
from amaranth.lib import fifo, stream, wiring
from amaranth.lib.wiring import In, Out

__all__ = ["QueueMemory", "StreamQueue"]

QueueMemory = Literal["distributed", "block"]


class StreamQueue(wiring.Component):
    """First-in first-out queue of `depth` items.

    Parameters
    ----------
    shape : payload shape.
    depth : items that it holds, at least 2.
    memory : "distributed" (LUT RAM, for tens of items) or "block" (for hundreds).

    Members
    -------
    i : In stream of `shape`.
    o : Out stream of `shape`.
    level : Out, items inside, 0 to `depth`.

    Raises
    ------
    ValueError : `depth` or `memory` outside their range.
    """

    #: Cycles from a transfer on an empty queue's `i` to the same item on `o`, by kind of memory.
    LATENCY: dict[QueueMemory, int] = {"distributed": 1, "block": 2}

    def __init__(self, shape: ShapeLike, depth: int, *, memory: QueueMemory = "distributed") -> None:
        if depth < 2:
            raise ValueError(f"depth must be at least 2 items, not {depth!r}")
        if memory not in get_args(QueueMemory):
            raise ValueError(f"memory must be one of {get_args(QueueMemory)}, not {memory!r}")
        self.shape, self.depth, self.memory = shape, depth, memory
        super().__init__(
            {
                "i": In(stream.Signature(shape)),
                "o": Out(stream.Signature(shape)),
                "level": Out(range(depth + 1)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Join the two streams to the FIFO's write and read ports."""
        m = Module()
        kind = fifo.SyncFIFO if self.memory == "distributed" else fifo.SyncFIFOBuffered
        m.submodules.fifo = queue = kind(width=Shape.cast(self.shape).width, depth=self.depth)
        wiring.connect(m, wiring.flipped(self.i), queue.w_stream)
        wiring.connect(m, queue.r_stream, wiring.flipped(self.o))
        m.d.comb += self.level.eq(queue.level)
        return m
