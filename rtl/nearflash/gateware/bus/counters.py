"""Performance counters: count between start and done, then hold still for the host.

Contract: `start` clears the running counts; every later cycle adds each of `events`; `done` copies the counts, its own
cycle included, to `latched`, which changes at no other time. The running counts wrap at 2**width_bits. Reset clears
both.

Timing: `latched` is new LATENCY cycles after `done`; back-pressure: none. All inputs go to registers first, since
events come late in their cycle.
"""

from collections.abc import Mapping

from amaranth import Module, Signal
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

__all__ = ["Counters"]


class Counters(wiring.Component):
    """One counter for each name in `increments`.

    Parameters
    ----------
    increments : name -> bits of what it may add in one cycle (1 for an event that is there or not).
    width_bits : of each counter.

    Members
    -------
    start, done : In, one-cycle pulses.
    events : In, struct {name: increment of this cycle}.
    latched : Out, struct {name: count at the last `done`}.

    Raises
    ------
    ValueError : `increments` is empty, or one is wider than the counters.
    """

    #: Cycles from `done` to `latched`.
    LATENCY = 2

    def __init__(self, increments: Mapping[str, int], width_bits: int = 64) -> None:
        if not increments:
            raise ValueError(f"increments must name at least one counter, not {increments!r}")
        for name, bits in increments.items():
            if not 1 <= bits <= width_bits:
                raise ValueError(f"increments[{name!r}] must be 1 to {width_bits} bits, not {bits!r}")
        self.width_bits = width_bits
        self.names = tuple(increments)
        super().__init__(
            {
                "start": In(1),
                "done": In(1),
                "events": In(data.StructLayout(dict(increments))),
                "latched": Out(data.StructLayout({name: width_bits for name in increments})),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """One adder a counter serves both the running count and the latched one."""
        m = Module()
        start, done, events = Signal(), Signal(), Signal.like(self.events)
        m.d.sync += [start.eq(self.start), done.eq(self.done), events.eq(self.events)]
        for name in self.names:
            count = Signal(self.width_bits, name=name)
            total = Signal(self.width_bits, name=f"{name}_total")
            m.d.comb += total.eq(count + events[name])
            m.d.sync += count.eq(total)
            with m.If(start):
                m.d.sync += count.eq(0)
            with m.If(done):
                m.d.sync += self.latched[name].eq(total)
        return m
