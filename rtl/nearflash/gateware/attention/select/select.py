"""RadixSelector: marks the k entries with the largest keys, or those that hold a probability mass.

    i ─► KeyStore ─┬─► 4 histograms ─► sums of bins ─► Threshold
                   │                                       │
                   └─► compare, rank ◄─────────────────────┘
                          └─► queue ─► o

A radix selection of two digits: fill the store and count the first digits of all keys; scan; replay the store and count
the second digits of the keys that have the threshold's first digit; scan; replay again and mark what lies above the
threshold and, of its equals, as many as are still wanted, lower index first.

Contract: one command, then the keys of its entries, then their mask, in turns. Lanes are valid in all beats but the
last; there the lowest ones are. At most min(count, entries) entries are marked, exactly that many without `mass`. The
weight of an entry is its key's value: that of a summed probability, as model.topk.weights has it. Reset drops
everything; the next command waits until the histograms are cleared.

Timing: settled_cycles + 2 · beats from the last key to the last bit of the mask, whatever the keys, if nothing stalls;
one beat a cycle in and out; back-pressure: yes.
Numerics: exact; equals nearflash.model.attention.select.select.
Limits: with `mass` the total weight must not be zero. What is beyond `entries` overwrites the first keys.
"""

from typing import Any

from amaranth import C, Cat, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.fixed_point import WEIGHT_BITS
from nearflash.gateware.attention.engine.interfaces import TOKEN_BITS, MaskBeat
from nearflash.gateware.attention.select.keystore import LANES, KeyStore, key_beat
from nearflash.gateware.attention.select.tally import Tally
from nearflash.gateware.attention.select.threshold import MASS_BITS, Threshold
from nearflash.gateware.fp.pipeline import delay, register, wire
from nearflash.gateware.stream.credit import CreditPipeline

__all__ = ["RadixCommand", "RadixSelector"]

_SETTLE_CYCLES = 8
"""More than the pipelines' stages: until a phase has left no trace."""
_MARK_CYCLES = KeyStore.LATENCY + 3


class RadixCommand(data.Struct):
    """Mark `count` entries; with `mass`, not zero, that share of the weight in 2^-16, but at most `count` entries."""

    count: TOKEN_BITS
    mass: MASS_BITS


class RadixSelector(wiring.Component):
    """The `count` largest of up to `entries` keys.

    Parameters
    ----------
    entries : keys that it holds, a power of two, at least 8.
    weighted : it can select by mass; only for 16-bit keys.
    key_bits : even; fewer than 16 make a selector that can be proven.

    Members
    -------
    i_command : In stream of RadixCommand. i : In stream of `key_beat`. o : Out stream of MaskBeat.

    Raises
    ------
    ValueError : a parameter outside its range.
    """

    def __init__(self, entries: int, *, weighted: bool = False, key_bits: int = 16) -> None:
        if entries < 8 or entries & (entries - 1):
            raise ValueError(f"entries must be a power of two, at least 8, not {entries!r}")
        if key_bits % 2 or not 2 <= key_bits <= 16 or (weighted and key_bits != 16):
            raise ValueError(f"key_bits must be even, 2 to 16, and 16 with weights, not {key_bits!r}")
        self.entries, self.weighted, self.key_bits = entries, weighted, key_bits
        self._digit_bits, self._count_bits = key_bits // 2, entries.bit_length()
        self._weight_bits = WEIGHT_BITS + entries.bit_length() - 1 if weighted else 0
        self._keys_settle_cycles = _SETTLE_CYCLES + (MASS_BITS if weighted else 0)
        #: Cycles from the last key to the last bit of the mask, beside two a beat.
        self.settled_cycles = (
            2 * (self._keys_settle_cycles + (1 << self._digit_bits) + _SETTLE_CYCLES) + _MARK_CYCLES + 1
        )
        super().__init__(
            {
                "i_command": In(stream.Signature(RadixCommand)),
                "i": In(stream.Signature(key_beat(key_bits))),
                "o": Out(stream.Signature(MaskBeat)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """The datapath; `_control` leads it through its phases."""
        m = Module()
        m.submodules.store = store = KeyStore(self.entries, self.key_bits)
        m.submodules.threshold = threshold = Threshold(self._digit_bits, self._count_bits, self._weight_bits)
        sums, amounts = {"entries": self._count_bits}, {"entries": 1}
        if self.weighted:
            sums["weight"], amounts["weight"] = self._weight_bits, WEIGHT_BITS
        m.submodules.tally = tally = Tally(self._digit_bits, sums, amounts)
        m.submodules.credit = credit = CreditPipeline(_MARK_CYCLES, 1, MaskBeat)
        wiring.connect(m, credit.o, wiring.flipped(self.o))
        phase = _Phase(self._digit_bits)
        mask, equals = self._mark(m, store.o, threshold)
        marks = delay(m, credit.core_valid, _MARK_CYCLES - 1)
        m.d.comb += [
            store.i.eq(self.i.payload),
            store.write.eq(self.i.valid & self.i.ready),
            store.read.eq(phase.replay | credit.core_valid),
            store.rewind.eq(phase.settle),
            threshold.start.eq(self.i_command.valid & self.i_command.ready),
            Cat(threshold.count, threshold.mass).eq(self.i_command.payload),
            threshold.scan.eq(delay(m, phase.scan, Tally.LATENCY)),
            threshold.digit.eq(delay(m, phase.digit, Tally.LATENCY)),
            threshold.entries.eq(Mux(marks, equals, tally.o.entries)),
            threshold.take.eq(marks),
            credit.i.valid.eq(phase.mark),
            credit.i.payload.eq(store.final),
            credit.core_o.mask.eq(mask),
            credit.core_o.last.eq(delay(m, credit.core_i, _MARK_CYCLES)),
        ]
        self._count(m, tally, phase, store.o, threshold.key)
        if self.weighted:
            self._weigh(m, tally, phase, store.o, threshold)
        self._control(m, phase, store, credit.i)
        return m

    def _mark(self, m: Module, beat: Any, threshold: Threshold) -> tuple[Value, Value]:
        """Mask, three cycles after the keys, and one cycle before it the number of equals that it looks at."""
        # Cycle 0: compare.
        above = register(m, Cat(key > threshold.key for key in beat.keys) & beat.valid)
        equal = register(m, Cat(key == threshold.key for key in beat.keys) & beat.valid)
        # Cycle 1: rank among the equals of the beat.
        ranks = [register(m, wire(m, sum(equal[:lane], C(0, 2))[:2])) for lane in range(LANES)]
        equals = register(m, wire(m, sum(equal, C(0, 3))[:3]))
        above, equal = register(m, above), register(m, equal)
        # Cycle 2: `left` + 1 equals are wanted.
        left = threshold.left
        many = ~left[-1] & left[2:].any()
        wanted = [many | (~left[-1] & (left[:2] >= rank)) for rank in ranks]
        return register(m, above | (equal & Cat(wanted))), equals

    def _count(self, m: Module, tally: Tally, phase: "_Phase", beat: Any, key: Value) -> None:
        """The first digits of all keys, or the second ones of those whose first digit is the threshold's."""
        first = key[: self._digit_bits]
        m.d.comb += [tally.scan.eq(phase.scan), tally.digit.eq(phase.digit)]
        for lane in range(LANES):
            low, high = beat.keys[lane][: self._digit_bits], beat.keys[lane][self._digit_bits :]
            largest = beat.local[lane].replicate(self._digit_bits)
            m.d.comb += [
                tally.bin[lane].eq(Mux(phase.second, low, high | largest)),
                tally.add[lane].eq(beat.valid[lane] & phase.count & (~phase.second | (high == first))),
                tally.amount[lane].entries.eq(1),
            ]

    def _weigh(self, m: Module, tally: Tally, phase: "_Phase", beat: Any, threshold: Threshold) -> None:
        """Weights beside the counts, and in the first pass the total."""
        weights = [_weight(m, key) for key in beat.keys]
        m.d.comb += [threshold.weight.eq(tally.o.weight), threshold.multiply.eq(register(m, phase.multiply))]
        m.d.comb += [tally.amount[lane].weight.eq(weight) for lane, weight in enumerate(weights)]
        added = [register(m, Mux(tally.add[lane], weight, 0)) for lane, weight in enumerate(weights)]
        pairs = [register(m, added[0] + added[1]), register(m, added[2] + added[3])]
        four = register(m, pairs[0] + pairs[1])
        total = Signal(self._weight_bits)
        with m.If(threshold.start):
            m.d.sync += total.eq(0)
        with m.Else():  # in the second pass too, after its last use
            m.d.sync += total.eq(total + four)
        m.d.comb += threshold.total.eq(total)

    def _control(self, m: Module, phase: "_Phase", store: KeyStore, mark: Any) -> None:
        """One state a phase; between two of them one in which the pipelines run empty."""
        waited = Signal(range(self._keys_settle_cycles))

        def settle(cycles: int) -> Value:
            """Rewinds the store; the last one of `cycles`."""
            end = waited == cycles - 1
            m.d.comb += phase.settle.eq(1)
            m.d.sync += waited.eq(Mux(end, 0, waited + 1))
            return end

        def scan(then: str) -> None:
            m.d.comb += phase.scan.eq(1)
            m.d.sync += phase.digit.eq(phase.digit - 1)
            with m.If(phase.digit == 0):
                m.next = then

        with m.FSM():
            with m.State("CLEAR"):
                scan("COMMAND")
            with m.State("COMMAND"):
                m.d.comb += [self.i_command.ready.eq(1), phase.settle.eq(1)]
                m.d.sync += phase.second.eq(0)
                with m.If(self.i_command.valid):
                    m.next = "FILL"
            with m.State("FILL"):
                m.d.comb += [self.i.ready.eq(1), phase.count.eq(1)]
                with m.If(self.i.valid & self.i.payload.last):
                    m.next = "SETTLE-KEYS"
            with m.State("SETTLE-KEYS"):
                m.d.comb += [phase.count.eq(1), phase.multiply.eq(~phase.second & (waited >= _SETTLE_CYCLES))]
                with m.If(settle(self._keys_settle_cycles)):
                    m.next = "SCAN"
            with m.State("SCAN"):
                scan("SETTLE-SCAN")
            with m.State("SETTLE-SCAN"):
                with m.If(settle(_SETTLE_CYCLES)):
                    m.d.sync += phase.second.eq(1)
                    m.next = "REPLAY"
                    with m.If(phase.second):
                        m.next = "MARK"
            with m.State("REPLAY"):
                m.d.comb += [phase.count.eq(1), phase.replay.eq(1)]
                with m.If(store.final):
                    m.next = "SETTLE-KEYS"
            with m.State("MARK"):
                m.d.comb += phase.mark.eq(1)
                with m.If(mark.ready & store.final):
                    m.next = "SETTLE-MASK"
            with m.State("SETTLE-MASK"):
                with m.If(settle(_SETTLE_CYCLES)):
                    m.next = "COMMAND"


class _Phase:
    """Control that the phases give the datapath."""

    def __init__(self, digit_bits: int) -> None:
        self.count, self.replay, self.mark, self.scan = Signal(), Signal(), Signal(), Signal()
        self.settle, self.multiply, self.second = Signal(), Signal(), Signal()
        self.digit = Signal(digit_bits, init=-1)
        """Bin that is scanned, from the largest."""


def _weight(m: Module, key: Value) -> Value:
    """Value of a summed probability's key: (1024 + fraction) · 2^(exponent - 13), exact; 0 for a key of 0.

    Other keys have an exponent of 3 at least; for that of 0 the distance wraps, and the shift leaves nothing.
    """
    fraction, exponent = key[:10], key[10:15]
    distance = wire(m, (exponent - 3)[:5])
    shifted = wire(m, Cat(fraction, C(1, 1)) << distance)
    return wire(m, shifted[10 : 10 + WEIGHT_BITS])
