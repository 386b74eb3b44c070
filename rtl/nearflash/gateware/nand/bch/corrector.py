"""Corrector: from the syndromes of a codeword to its error positions, the key equation of one codeword while the roots
of the one before are searched.

    four syndromes a beat ──► KeyEquation ──► RootSearch ──► error positions

Contract: for each codeword four beats of syndromes in, not all zero; out its error positions in ascending order, or one
item that says uncorrectable. Reset drops the codewords inside.

Timing: see the two parts; back-pressure: yes.
Numerics: finds what nearflash.model.nand.bch.corrector finds.
"""

from amaranth import Module
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.codeword import BCH_BITS
from nearflash.gateware.nand.bch.key_equation import SYNDROMES_A_BEAT, KeyEquation
from nearflash.gateware.nand.bch.root_search import RootSearch
from nearflash.gateware.nand.codeword import ErrorPosition

__all__ = ["Corrector"]


class Corrector(wiring.Component):
    """Slow path of the BCH decoder.

    Members
    -------
    i : In stream of four syndromes; a codeword's S_1, S_3, S_5, S_7 first.
    o : Out stream of ErrorPosition.
    """

    i: In(stream.Signature(BCH_BITS * SYNDROMES_A_BEAT))
    o: Out(stream.Signature(ErrorPosition))

    def elaborate(self, platform: object) -> Module:
        """Two units in a row."""
        m = Module()
        m.submodules.key_equation = key_equation = KeyEquation()
        m.submodules.root_search = root_search = RootSearch()
        wiring.connect(m, wiring.flipped(self.i), key_equation.i)
        wiring.connect(m, key_equation.o, root_search.i)
        wiring.connect(m, root_search.o, wiring.flipped(self.o))
        return m
