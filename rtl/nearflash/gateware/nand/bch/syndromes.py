"""Syndromes of a codeword, 64 bits a cycle: its values at alpha, alpha^3, …, alpha^31.

    beat ──► sums of up to four bits ──► 16 x 13 sums of these ──► S[i] := alpha^64i · S[i] + sum

Horner's rule with 64 bits a step. S[i] is kept by its coordinates in the powers of alpha^64i, in which a step is a
shift with feedback (`field.element` brings it back). The codeword is taken as 69 beats whose last 16 bits are zero, so
bit j counts as the coefficient of x^(4415 - j): x^16 times the codeword of the contract, which has the same roots.

Contract: a beat is taken in every cycle with `enable`; `first` marks the first beat of a codeword and starts anew.
All syndromes are zero exactly if message and parity belong together. No reset is needed.

Timing: `o` has the syndromes after a beat LATENCY cycles later; one beat a cycle; back-pressure: none.
"""

from amaranth import Cat, Const, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.codeword import BCH_BITS, BCH_ERRORS
from nearflash.gateware.coding import linear
from nearflash.gateware.nand.bch.field import coordinates, minimal_polynomial

__all__ = ["SYNDROME_BITS", "Syndromes"]

SYNDROME_BITS = BCH_BITS * BCH_ERRORS


class Syndromes(wiring.Component):
    """The 16 odd syndromes of a stream of beats.

    Members
    -------
    enable : In, whether there is a beat.
    first : In, whether it is the first one of a codeword.
    data : In, 64 bits, bit 0 first.
    o : Out, S_1, S_3, …, S_31, 13 bits each, the first one lowest, each by its coordinates.
    """

    #: Cycles from a beat to the syndromes of all beats up to it.
    LATENCY = 2

    enable: In(1)
    first: In(1)
    data: In(64)
    o: Out(SYNDROME_BITS)

    def elaborate(self, platform: object) -> Module:
        """Cycle 0: sums within groups of the beat. Cycle 1: the step of Horner's rule."""
        m = Module()
        odd = range(1, 2 * BCH_ERRORS, 2)
        places = [coordinates(i) for i in odd]
        columns = [sum(place[63 - bit] << BCH_BITS * k for k, place in enumerate(places)) for bit in range(64)]
        part = linear.apply(m, columns, self.data, SYNDROME_BITS, registered=True)
        enable, first = Signal(), Signal()
        m.d.sync += [enable.eq(self.enable), first.eq(self.first)]
        for k, i in enumerate(odd):
            syndrome = Signal(BCH_BITS, name=f"s{i}", reset_less=True)
            feedback = minimal_polynomial(i) & ((1 << BCH_BITS) - 1)
            stepped = Cat(Const(0, 1), syndrome[:-1]) ^ (syndrome[-1].replicate(BCH_BITS) & feedback)
            with m.If(enable):
                m.d.sync += syndrome.eq((stepped & ~first.replicate(BCH_BITS)) ^ part[BCH_BITS * k :][:BCH_BITS])
            m.d.comb += self.o[BCH_BITS * k : BCH_BITS * (k + 1)].eq(syndrome)
        return m
