"""Syndromes of a codeword, 64 bits a cycle: its values at alpha, alpha^3, …, alpha^31.

    beat ──► sums of four bits ──► 13 x 16 sums ──► S[i] := alpha^64i · S[i] + sum

Horner's rule with 64 bits a step. The codeword is taken as 69 beats whose last 16 bits are zero, so bit j counts as the
coefficient of x^(4415 - j): x^16 times the codeword of the contract, which has the same roots.

Contract: a beat is taken in every cycle with `enable`; `first` marks the first beat of a codeword and starts anew.
All syndromes are zero exactly if message and parity belong together. No reset is needed.

Timing: `o` has the syndromes after a beat LATENCY cycles later; one beat a cycle; back-pressure: none.
"""

from amaranth import Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.attend.codeword import BCH_BITS, BCH_ERRORS
from nearflash.gateware.fp.pipeline import register
from nearflash.gateware.nfc import linear
from nearflash.gateware.nfc.bch.field import power, scaling

__all__ = ["SYNDROME_BITS", "Syndromes"]

SYNDROME_BITS = BCH_BITS * BCH_ERRORS


class Syndromes(wiring.Component):
    """The 16 odd syndromes of a stream of beats.

    Members
    -------
    enable : In, whether there is a beat.
    first : In, whether it is the first one of a codeword.
    data : In, 64 bits, bit 0 first.
    o : Out, S_1, S_3, …, S_31, 13 bits each, the first one lowest.
    """

    #: Cycles from a beat to the syndromes of all beats up to it.
    LATENCY = 2

    enable: In(1)
    first: In(1)
    data: In(64)
    o: Out(SYNDROME_BITS)

    def elaborate(self, platform: object) -> Module:
        """Cycle 0: the beat's part of each syndrome. Cycle 1: the step of Horner's rule."""
        m = Module()
        odd = range(1, 2 * BCH_ERRORS, 2)
        columns = [sum(power(i * (63 - bit)) << BCH_BITS * k for k, i in enumerate(odd)) for bit in range(64)]
        part = register(m, linear.apply(m, columns, self.data, SYNDROME_BITS))
        enable, first = Signal(), Signal()
        m.d.sync += [enable.eq(self.enable), first.eq(self.first)]
        for k, i in enumerate(odd):
            place = slice(BCH_BITS * k, BCH_BITS * (k + 1))
            syndrome = Signal(BCH_BITS, name=f"s{i}", reset_less=True)
            stepped = linear.apply(m, scaling(64 * i), syndrome & (~first).replicate(BCH_BITS), BCH_BITS)
            with m.If(enable):
                m.d.sync += syndrome.eq(stepped ^ part[place])
            m.d.comb += self.o[place].eq(syndrome)
        return m
