"""Channel selector: the r largest of up to 256 keys, as a mask; lower index first among equals.

    i ─► keys, four a row ─► ≥ each of three candidates ─► counts ─► next two bits of the r-th largest key
                                  └─ with its value known: above it or equal ─► o

The r-th largest key is found from its top two bits down: for each of the three candidates that its next two bits allow,
all keys that reach it are counted; the largest candidate that r keys reach has the right bits.

Contract: behind the last row of a set of keys its mask leaves on o, row by row; then the next set is taken.

Timing: 11 cycles a row and 40 behind the last row of keys, while o is ready; back-pressure: yes.
"""

from amaranth import C, Cat, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.gateware.attention.engine.interfaces import MaskBeat

__all__ = ["DimSelector", "KeyRow"]

_KEY_BITS, _LANES, _ROWS = 16, 4, 64


class KeyRow(data.Struct):
    """Keys 4i .. 4i + 3; `last` ends the set."""

    keys: data.ArrayLayout(_KEY_BITS, _LANES)
    last: 1


class DimSelector(wiring.Component):
    """Selects the `count` largest keys.

    Members
    -------
    count : In, r, 1 to the number of keys; holds still from the last row of keys to the last of the mask.
    i : In stream of KeyRow. o : Out stream of MaskBeat.
    """

    count: In(9)
    i: In(stream.Signature(KeyRow))
    o: Out(stream.Signature(MaskBeat))

    def elaborate(self, platform: object) -> Module:
        """Rows are read one a cycle; comparison and count follow, a cycle each."""
        m = Module()
        m.submodules.keys = keys = Memory(shape=_KEY_BITS * _LANES, depth=_ROWS, init=[])
        write, read = keys.write_port(), keys.read_port(domain="comb")
        row, end = Signal(range(_ROWS)), Signal(range(_ROWS))
        unit, threshold = Signal(_KEY_BITS), Signal(_KEY_BITS)  # place of the next two bits; those above
        candidates = [Signal(_KEY_BITS, name=f"candidate_{n}") for n in range(3)]
        reading, comparing, counting = Signal(), Signal(), Signal()
        m.d.comb += [read.addr.eq(row), write.addr.eq(row), write.data.eq(self.i.payload.keys)]
        m.d.sync += [comparing.eq(reading), counting.eq(comparing)]
        reach, counts = self._count(m, read.data, candidates, counting)

        above, ties = Signal(9), Signal(9)  # keys above the threshold; equal ones still to be taken
        with m.FSM():
            with m.State("LOAD"):
                m.d.comb += [self.i.ready.eq(1), write.en.eq(self.i.valid)]
                m.d.sync += [*(total.eq(0) for total in counts), threshold.eq(0), above.eq(0), unit.eq(1 << 14)]
                m.d.sync += [candidate.eq((n + 1) << 14) for n, candidate in enumerate(candidates)]
                with m.If(self.i.valid):
                    m.d.sync += [row.eq(Mux(self.i.payload.last, 0, row + 1)), end.eq(row)]
                    with m.If(self.i.payload.last):
                        m.next = "COUNT"
            with m.State("COUNT"):
                m.d.comb += reading.eq(1)
                m.d.sync += row.eq(row + 1)
                with m.If(row == end):
                    m.next = "SETTLE"
            with m.State("SETTLE"):
                with m.If(~comparing & ~counting):
                    m.next = "DECIDE"
            with m.State("DECIDE"):
                self._decide(m, candidates, counts, threshold, above, unit)
                m.d.sync += row.eq(0)
                m.next = "AIM"
            with m.State("AIM"):
                m.d.sync += [*(total.eq(0) for total in counts), ties.eq(self.count - above)]
                multiples = [unit, unit << 1, unit | unit << 1]
                m.d.sync += [c.eq(threshold | multiple) for c, multiple in zip(candidates, multiples, strict=True)]
                m.next = "COUNT"
                with m.If(unit == 0):
                    m.d.sync += [candidates[0].eq(threshold), candidates[1].eq(threshold + 1)]
                    m.next = "READ"
            with m.State("READ"):
                m.d.comb += reading.eq(1)
                with m.If(comparing):
                    m.next = "EMIT"
            with m.State("EMIT"):
                with m.If(self._emit(m, reach, ties, row == end)):
                    m.d.sync += row.eq(row + 1)
                    m.next = "READ"
                    with m.If(row == end):
                        m.d.sync += row.eq(0)
                        m.next = "LOAD"
        return m

    def _count(
        self, m: Module, keys: Value, candidates: list[Signal], counting: Signal
    ) -> tuple[list[Signal], list[Signal]]:
        """For each candidate: which keys of the row reach it, and how many have so far."""
        # Cycle 0: read. Cycle 1: compare. Cycle 2: count.
        values = Signal(data.ArrayLayout(_KEY_BITS, _LANES))
        reach = [Signal(_LANES, name=f"reach_{n}") for n in range(3)]
        counts = [Signal(9, name=f"count_{n}") for n in range(3)]
        m.d.sync += values.eq(keys)
        for candidate, lanes, total in zip(candidates, reach, counts, strict=True):
            m.d.sync += lanes.eq(Cat(value >= candidate for value in values))
            with m.If(counting):
                m.d.sync += total.eq(total + sum(lanes))
        return reach, counts

    def _decide(
        self, m: Module, candidates: list[Signal], counts: list[Signal], threshold: Signal, above: Signal, unit: Signal
    ) -> None:
        """The largest candidate that enough keys reach; what reaches the next larger one lies above."""
        m.d.sync += [unit.eq(unit >> 2), above.eq(counts[0])]
        for n, (candidate, total) in enumerate(zip(candidates, counts, strict=True)):
            with m.If(total >= self.count):
                m.d.sync += [threshold.eq(candidate), above.eq(counts[n + 1] if n < 2 else above)]

    def _emit(self, m: Module, reach: list[Signal], ties: Signal, last: object) -> object:
        """One row of the mask: keys above the threshold, and as many equal ones as there are to be taken."""
        equal = reach[0] & ~reach[1]
        ranks = [sum((equal[k] for k in range(lane)), C(0, 2)) for lane in range(_LANES)]
        taken = Cat(equal[lane] & (ties > rank) for lane, rank in enumerate(ranks))
        m.d.comb += [
            self.o.valid.eq(1),
            self.o.payload.mask.eq(reach[1] | taken),
            self.o.payload.last.eq(last),
        ]
        equals = sum(equal)
        with m.If(self.o.ready):
            m.d.sync += ties.eq(Mux(ties > equals, ties - equals, 0))
        return self.o.ready
