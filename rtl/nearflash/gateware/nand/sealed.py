"""Checker of sealed codewords from memory: no bit errors, no scrambling; whose they are.

Contract: codewords leave in order, 65 beats each (aux, then data). One with a wrong CRC is foreign. Reset drops what is
inside.

Timing: a codeword's first beat leaves LATENCY cycles after its last one came; 68 cycles a codeword; back-pressure: yes.
Numerics: equals nearflash.model.nand.codeword.check.
"""

from amaranth import Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.attention.engine.interfaces import CodewordBeat
from nearflash.gateware.nand.codeword import OWNED_BEATS, SealedOwner
from nearflash.gateware.nand.crc_checker import CrcChecker

__all__ = ["SealedChecker"]


class SealedChecker(wiring.Component):
    """Puts the owner block ahead of each sealed codeword and checks its CRC.

    Members
    -------
    i_owner : In stream of SealedOwner, one a codeword.
    i : In stream of 64 bits, 66 beats a codeword: aux, data, CRC.
    o : Out stream of CodewordBeat, 65 beats a codeword.
    foreign : Out, pulse: a codeword was found to be so.
    """

    #: Cycles from a codeword's last beat to its first one on `o`.
    LATENCY = CrcChecker.LATENCY

    i_owner: In(stream.Signature(SealedOwner))
    i: In(stream.Signature(64))
    o: Out(stream.Signature(CodewordBeat))
    foreign: Out(1)

    def elaborate(self, platform: object) -> Module:
        """Two beats of owner block, then 66 from memory."""
        m = Module()
        m.submodules.crc = crc = CrcChecker()
        beat, moves = Signal(range(OWNED_BEATS)), Signal()
        owner = self.i_owner.payload
        block = owner.page.block(owner.number)
        last, in_block = beat == OWNED_BEATS - 1, beat < len(block)
        m.d.comb += [
            crc.i.payload.data.eq(Mux(in_block, Mux(beat[0], block[1], block[0]), self.i.payload)),
            crc.i.valid.eq(Mux(in_block, self.i_owner.valid, self.i.valid)),
            moves.eq(crc.i.valid & crc.i.ready),
            self.i.ready.eq(crc.i.ready & ~in_block),
            self.i_owner.ready.eq(moves & (beat == len(block) - 1)),
            self.foreign.eq(crc.foreign),
        ]
        with m.If(moves):
            m.d.sync += beat.eq(Mux(last, 0, beat + 1))
        wiring.connect(m, crc.o, wiring.flipped(self.o))
        return m
