"""Seal check: the CRC of sealed codewords, on the way past.

    page tag, sealed codeword ──► Crc32c ──► wrong
                 sealed codeword ───────────────────► o

Contract: beats leave as they come, one for one; `wrong` pulses with the last beat of a codeword whose CRC does not fit
its page_tag, by when all others have left. Reset drops the CRC of the codeword inside.

Timing: no latency (combinational, from `i` to `o` and back); 68 cycles a codeword; back-pressure: yes.
Numerics: equals nearflash.model.nand.codeword.check.
"""

from amaranth import Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.coding.crc import Crc32c
from nearflash.gateware.nand.codeword import TAGGED_BEATS, SealedTag

__all__ = ["SealCheck", "SealedBeat"]


class SealedBeat(data.Struct):
    """A beat of a sealed codeword."""

    data: 64
    last: 1


class SealCheck(wiring.Component):
    """Checks the CRC of codewords without holding them back.

    Members
    -------
    i_page_tag : In stream of SealedTag, one a codeword.
    i : In stream of 64 bits, 66 beats a codeword: aux, data, CRC.
    o : Out stream of SealedBeat, the same beats.
    wrong : Out, pulse: a codeword's CRC is not that of its page_tag, page and number.
    """

    i_page_tag: In(stream.Signature(SealedTag))
    i: In(stream.Signature(64))
    o: Out(stream.Signature(SealedBeat))
    wrong: Out(1)

    def elaborate(self, platform: object) -> Module:
        """Two beats of page tag for the CRC alone, then 66 that pass."""
        m = Module()
        m.submodules.crc = crc = Crc32c()
        beat, taken = Signal(range(TAGGED_BEATS)), Signal()
        block = self.i_page_tag.payload.page.block(self.i_page_tag.payload.number)
        in_block, last = beat < len(block), beat == TAGGED_BEATS - 1
        m.d.comb += [
            self.o.payload.data.eq(self.i.payload),
            self.o.payload.last.eq(last),
            self.o.valid.eq(self.i.valid & ~in_block),
            self.i.ready.eq(self.o.ready & ~in_block),
            taken.eq(Mux(in_block, self.i_page_tag.valid, self.i.valid & self.i.ready)),
            self.i_page_tag.ready.eq(taken & last),
            crc.enable.eq(taken),
            crc.first.eq(beat == 0),
            crc.data.eq(Mux(in_block, Mux(beat[0], block[1], block[0]), self.i.payload)),
            self.wrong.eq(taken & last & (crc.o != self.i.payload[:32])),
        ]
        with m.If(taken):
            m.d.sync += beat.eq(Mux(last, 0, beat + 1))
        return m
