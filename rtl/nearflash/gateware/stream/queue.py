"""Stream queue: a ring of words in distributed or in block RAM between two streams.

Contract: items leave in order, none lost, none invented. `o.valid` and `i.ready` come from registers: unlike those of
`amaranth.lib.fifo`, which compares its level, they add no logic to the paths behind them. Reset empties the queue; the
memory keeps its words, which cannot be seen any more.

Timing: latency `LATENCY[memory]` cycles; one item a cycle; back-pressure: yes, after `depth` items.
Limits: block RAM has a synchronous read port, so one of the `depth` items sits in its output register; a depth of
2**k + 1 fills a memory of 2**k words.
"""

from typing import Literal, get_args

from amaranth import Module, Mux, Shape, Signal
from amaranth.hdl import ShapeLike
from amaranth.lib import stream, wiring
from amaranth.lib.memory import Memory
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
        """Words between the write and the read position are full; `some` tells when there are any."""
        m = Module()
        block = self.memory == "block"
        words = self.depth - 1 if block else self.depth
        m.submodules.storage = storage = Memory(shape=Shape.cast(self.shape).width, depth=words, init=[])
        write, read = storage.write_port(), storage.read_port(domain="sync" if block else "comb")
        full_words = Signal(range(words + 1))
        room, some = Signal(init=1), Signal()
        push, pop = Signal(), Signal()

        m.d.comb += [
            self.i.ready.eq(room),
            push.eq(self.i.valid & room),
            write.data.eq(self.i.payload),
            write.en.eq(push),
            self.o.payload.eq(read.data),
        ]
        for port, step in ((write, push), (read, pop)):
            position = Signal(range(words))
            m.d.comb += port.addr.eq(position)
            with m.If(step):
                m.d.sync += position.eq(Mux(position == words - 1, 0, position + 1))
        with m.If(push != pop):
            m.d.sync += [
                full_words.eq(full_words + Mux(pop, -1, 1)),
                room.eq(pop | (full_words != words - 1)),
                some.eq(push | (full_words != 1)),
            ]

        if block:  # the read port's register is one place more
            m.d.comb += [pop.eq(some & (self.o.ready | ~self.o.valid)), read.en.eq(pop)]
            m.d.comb += self.level.eq(full_words + self.o.valid)
            with m.If(self.o.ready | ~self.o.valid):
                m.d.sync += self.o.valid.eq(some)
        else:
            m.d.comb += [self.o.valid.eq(some), pop.eq(some & self.o.ready), self.level.eq(full_words)]
        return m
