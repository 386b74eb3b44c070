"""Key equation of the BCH code: from syndromes to the error locator, by Berlekamp-Massey without inversion.

    discrepancy d = sum of L[k]·S[2r + 1 - k]          r = 0 … 15
    d != 0:  L' = g·L + d·P;  where the length n <= r:  P' = x²·L, g' = d, n' = 2r + 1 - n;  else P' = x²·P
    d == 0:  L' = L, P' = x²·P

In a binary code every second discrepancy is zero and is left out. L and P lie in LUT RAM; two multipliers work on one
coefficient a cycle. P is stored moved down by `offset`, so that x²·P costs nothing; an update walks from the highest
coefficient down, so that P' never overwrites what is still to be read.

Contract: for each codeword four beats of syndromes in, 17 beats out: coefficients of L, lowest first, and on each of
them the number of errors (the length n, 0 to 31; above 16 there is no locator). Reset drops the codeword inside.

Timing: 35 cycles to take the syndromes, then for each r about n + 4, twice that where d != 0, then 17: about 150
cycles for one error, 400 for 16; back-pressure: yes.
Source: Burton, Inversionless decoding of binary BCH codes, IEEE Trans. Inf. Theory 17 (1971).
"""

import functools
import operator

from amaranth import Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.codeword import BCH_BITS, BCH_ERRORS
from nearflash.gateware.coding import linear
from nearflash.gateware.fp.pipeline import wire
from nearflash.gateware.nand.bch.field import element, multiply, square

__all__ = ["SYNDROMES_A_BEAT", "Coefficient", "KeyEquation"]

SYNDROMES_A_BEAT = 4
_TERMS = BCH_ERRORS + 1


class Coefficient(data.Struct):
    """A coefficient of an error locator, and how many errors there are (constant over the locator)."""

    value: BCH_BITS
    errors: 5


class KeyEquation(wiring.Component):
    """Serial solver of the key equation.

    Members
    -------
    i : In stream of four syndromes; a codeword's S_1, S_3, S_5, S_7 first.
    o : Out stream of Coefficient, 17 a codeword.
    """

    i: In(stream.Signature(BCH_BITS * SYNDROMES_A_BEAT))
    o: Out(stream.Signature(Coefficient))

    def elaborate(self, platform: object) -> Module:
        """Cycle 0: read L[k], S or P. Cycle 1: square S; or multiply, sum up the discrepancy or write L'[k], P'[k]."""
        m = Module()
        m.submodules.syndromes = syndromes = Memory(shape=BCH_BITS, depth=32, init=[])
        m.submodules.locator = locator = Memory(shape=BCH_BITS, depth=32, init=[])
        m.submodules.previous = previous = Memory(shape=BCH_BITS, depth=32, init=[])
        self._s, self._l, self._p = (
            (memory.write_port(), memory.read_port(domain="comb")) for memory in (syndromes, locator, previous)
        )
        self._k, self._step, self._length = Signal(5), Signal(4), Signal(5)
        self._offset = Signal(6)

        # Cycle 0
        clear, first, in_square, in_sum, in_update = Signal(), Signal(), Signal(), Signal(), Signal()
        a, b, c = (Signal(BCH_BITS, name=name, reset_less=True) for name in ("a", "b", "c"))
        k_1, squares, sums, updates = Signal(5), Signal(), Signal(), Signal()
        scale, discrepancy, grows = Signal(BCH_BITS), Signal(BCH_BITS), Signal()
        below = wire(m, self._k - self._offset)
        m.d.comb += [self._l[1].addr.eq(self._k), self._p[1].addr.eq(below[:5])]
        m.d.sync += [
            a.eq(self._l[1].data),
            b.eq(Mux(in_update, scale, self._s[1].data)),
            c.eq(Mux(below[-1], 0, self._p[1].data)),
            k_1.eq(self._k),
            squares.eq(in_square),
            sums.eq(in_sum),
            updates.eq(in_update),
        ]

        # Cycle 1
        self._square(m, k_1, b, squares)
        left, right = multiply(m, a, b), multiply(m, c, discrepancy)
        with m.If(first):
            m.d.sync += discrepancy.eq(0)
        with m.Elif(sums):
            m.d.sync += discrepancy.eq(discrepancy ^ left)
        for (write, _), new, start, enable in (
            (self._l, left ^ right, self._k == 0, updates),
            (self._p, a, self._k == 0, updates & grows),
        ):
            m.d.comb += [
                write.addr.eq(Mux(clear, self._k, k_1)),
                write.data.eq(Mux(clear, start, new)),
                write.en.eq(clear | enable),
            ]

        with m.FSM():
            self._load(m, clear, in_square, scale)
            self._sum(m, first, in_sum)
            self._update(m, in_update, scale, discrepancy, grows)
            with m.State("EMIT"):
                m.d.comb += [self.o.payload.value.eq(self._l[1].data), self.o.payload.errors.eq(self._length)]
                m.d.comb += self.o.valid.eq(1)
                with m.If(self.o.ready):
                    m.d.sync += self._k.eq(self._k + 1)
                    with m.If(self._k == _TERMS - 1):
                        m.d.sync += self._k.eq(0)
                        m.next = "LOAD"
        return m

    def _square(self, m: Module, k: Signal, syndrome: Signal, enable: Signal) -> None:
        """S of twice the number, a cycle after `syndrome` was read."""
        write, _ = self._s
        m.d.comb += [
            write.addr.eq(Cat(0, _square_source(k))),
            write.data.eq(linear.apply(m, square(), syndrome, BCH_BITS)),
            write.en.eq(enable),
        ]

    def _load(self, m: Module, clear: Signal, in_square: Signal, scale: Signal) -> None:
        """The odd syndromes as they come, then the even ones as squares; meanwhile L := 1 and P := x."""
        k, (write, read) = self._k, self._s
        with m.State("LOAD"):
            m.d.comb += [clear.eq(self.i.valid), self.i.ready.eq(k[:2] == SYNDROMES_A_BEAT - 1)]
            m.d.comb += [write.addr.eq(Cat(1, k[:4])), write.en.eq(self.i.valid)]
            terms = [Const(0, BCH_BITS)]  # gates, for a switch would become a shifter, whose adders take longer
            for step in range(BCH_ERRORS):
                word = self.i.payload.word_select(step % SYNDROMES_A_BEAT, BCH_BITS)
                term = linear.apply(m, element(2 * step + 1), word, BCH_BITS)
                terms.append(term & (k[:4] == step).replicate(BCH_BITS))
            m.d.comb += write.data.eq(functools.reduce(operator.or_, terms))
            with m.If(self.i.valid):
                m.d.sync += k.eq(k + 1)
                with m.If(k == BCH_ERRORS - 1):
                    m.next = "SQUARE"
        with m.State("SQUARE"):  # k counts on from 16, so that L and P are cleared to their ends
            m.d.comb += [clear.eq(1), in_square.eq(1), read.addr.eq(_square_source(k))]
            m.d.sync += k.eq(k + 1)
            with m.If(k == 2 * BCH_ERRORS - 1):
                m.d.sync += [self._step.eq(0), self._length.eq(0), self._offset.eq(1), scale.eq(1)]
                m.next = "SUM"

    def _sum(self, m: Module, first: Signal, in_sum: Signal) -> None:
        """The discrepancy of step r, over k = 0 … n."""
        k = self._k
        with m.State("SUM"):
            m.d.comb += [in_sum.eq(1), first.eq(k == 0), self._s[1].addr.eq(Cat(1, self._step) - k)]
            m.d.sync += k.eq(k + 1)
            with m.If(k == self._length):
                m.next = "SETTLE"
        with m.State("SETTLE"):
            m.next = "CHECK"

    def _update(self, m: Module, in_update: Signal, scale: Signal, discrepancy: Signal, grows: Signal) -> None:
        """Do what the discrepancy asks for: L' and P' from k = n' down to 0, or only P'."""
        k, step, length = self._k, self._step, self._length

        def advance() -> None:
            m.d.sync += [k.eq(0), step.eq(step + 1)]
            with m.If(step == BCH_ERRORS - 1):
                m.next = "EMIT"
            with m.Else():
                m.next = "SUM"

        with m.State("CHECK"):
            dirty = wire(m, discrepancy.any())
            longer = wire(m, (length <= step) & dirty)
            new_length = wire(m, Mux(longer, Cat(1, step) - length, length)[:5])
            m.d.sync += [grows.eq(longer), k.eq(new_length), length.eq(new_length)]
            with m.If(dirty):
                m.next = "UPDATE"
            with m.Else():
                m.d.sync += self._offset.eq(self._offset + 2)
                advance()
        with m.State("UPDATE"):
            m.d.comb += in_update.eq(1)
            m.d.sync += k.eq(k - 1)
            with m.If(k == 0):
                m.next = "FLUSH"
        with m.State("FLUSH"):
            m.d.sync += self._offset.eq(Mux(grows, 2, self._offset + 2))
            with m.If(grows):
                m.d.sync += scale.eq(discrepancy)
            advance()


def _square_source(k: Value) -> Value:
    """Number of the syndrome that step `k` squares: 1, 0, 3, 2, … so that S_2 is written before it is read."""
    return Cat(~k[0], k[1:4])
