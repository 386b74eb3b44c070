"""Checker of sealed codewords from memory: no bit errors, no scrambling; whose they are.

Contract: codewords leave in order, 65 beats each (aux, then data). One with a wrong CRC is misdirected. Reset drops
what is inside.

Timing: a codeword's first beat leaves LATENCY cycles after its last one came; 68 cycles a codeword; back-pressure: yes.
Numerics: equals nearflash.model.nand.codeword.check.
"""

from amaranth import Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.nand.codeword import TAGGED_BEATS, SealedTag
from nearflash.gateware.nand.crc_checker import CrcChecker
from nearflash.gateware.nand.interfaces import CodewordBeat

__all__ = ["SealedChecker"]


class SealedChecker(wiring.Component):
    """Puts the page tag ahead of each sealed codeword and checks its CRC.

    Members
    -------
    i_page_tag : In stream of SealedTag, one a codeword.
    i : In stream of 64 bits, 66 beats a codeword: aux, data, CRC.
    o : Out stream of CodewordBeat, 65 beats a codeword.
    misdirected : Out, pulse: a codeword was found to be so.
    """

    #: Cycles from a codeword's last beat to its first one on `o`.
    LATENCY = CrcChecker.LATENCY

    i_page_tag: In(stream.Signature(SealedTag))
    i: In(stream.Signature(64))
    o: Out(stream.Signature(CodewordBeat))
    misdirected: Out(1)

    def elaborate(self, platform: object) -> Module:
        """Two beats of page tag, then 66 from memory."""
        m = Module()
        m.submodules.crc = crc = CrcChecker()
        beat, moves = Signal(range(TAGGED_BEATS)), Signal()
        page_tag = self.i_page_tag.payload
        block = page_tag.page.block(page_tag.number)
        last, in_block = beat == TAGGED_BEATS - 1, beat < len(block)
        m.d.comb += [
            crc.i.payload.data.eq(Mux(in_block, Mux(beat[0], block[1], block[0]), self.i.payload)),
            crc.i.valid.eq(Mux(in_block, self.i_page_tag.valid, self.i.valid)),
            moves.eq(crc.i.valid & crc.i.ready),
            self.i.ready.eq(crc.i.ready & ~in_block),
            self.i_page_tag.ready.eq(moves & (beat == len(block) - 1)),
            self.misdirected.eq(crc.misdirected),
        ]
        with m.If(moves):
            m.d.sync += beat.eq(Mux(last, 0, beat + 1))
        wiring.connect(m, crc.o, wiring.flipped(self.o))
        return m
