"""Writer: from sealed codewords to raw ones, as they go to NAND.

    owner block, sealed ──┬─► Crc32c ──► wrong
                          └─► Encoder ──► Scrambler ──► raw

Contract: codewords leave in order, 69 beats each, beat by beat as they come: `wrong` pulses with the last beat of a
codeword whose CRC does not fit its owner, by when most of it has left. Reset drops the codeword inside.

Timing: 72 cycles a codeword; back-pressure: yes.
Numerics: equals nearflash.model.nfc.codeword.raw to the bit.
"""

from amaranth import Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.nfc.bch.encoder import Encoder
from nearflash.gateware.nfc.codeword import OWNED_BEATS, SealedOwner
from nearflash.gateware.nfc.crc import Crc32c
from nearflash.gateware.nfc.link import RawBeat
from nearflash.gateware.nfc.scramble import Scrambler

__all__ = ["CodewordWriter", "WriteTarget"]


class WriteTarget(data.Struct):
    """Whose codeword comes next, and where it goes."""

    sealed: SealedOwner
    place: 5
    unit: 8
    row: 32
    final: 1


class CodewordWriter(wiring.Component):
    """Checks, encodes and scrambles sealed codewords.

    Members
    -------
    i_target : In stream of WriteTarget, one a codeword.
    i : In stream of 64 bits, 66 beats a codeword: aux, data, CRC.
    o : Out stream of RawBeat, 69 beats a codeword.
    wrong : Out, pulse: a codeword's CRC is not that of its owner, page and number.
    """

    i_target: In(stream.Signature(WriteTarget))
    i: In(stream.Signature(64))
    o: Out(stream.Signature(RawBeat))
    wrong: Out(1)

    def elaborate(self, platform: object) -> Module:
        """Two beats of owner block for the CRC alone, then 66 for the encoder too; the target stays to the end."""
        m = Module()
        m.submodules.crc = crc = Crc32c()
        m.submodules.encoder = encoder = Encoder()
        m.submodules.scrambler = scrambler = Scrambler()
        beat, taken = Signal(range(OWNED_BEATS + 1)), Signal()
        target = self.i_target.payload
        block = target.sealed.page.block(target.sealed.number)
        in_block, in_message = beat < len(block), (beat >= len(block)) & (beat < OWNED_BEATS)
        m.d.comb += [
            encoder.i.payload.eq(self.i.payload),
            encoder.i.valid.eq(self.i.valid & in_message),
            self.i.ready.eq(encoder.i.ready & in_message),
            taken.eq(Mux(in_block, self.i_target.valid, self.i.valid & self.i.ready)),
            crc.enable.eq(taken),
            crc.first.eq(beat == 0),
            crc.data.eq(Mux(in_block, Mux(beat[0], block[1], block[0]), self.i.payload)),
            self.wrong.eq(taken & (beat == OWNED_BEATS - 1) & (crc.o != self.i.payload[:32])),
        ]
        with m.If(taken):
            m.d.sync += beat.eq(beat + 1)

        raw = scrambler.i.payload
        m.d.comb += [getattr(raw, name).eq(getattr(target, name)) for name in ("place", "unit", "row", "final")]
        m.d.comb += [
            raw.number.eq(target.sealed.number),
            raw.data.eq(encoder.o.payload.data),
            raw.first.eq(encoder.o.payload.first),
            raw.last.eq(encoder.o.payload.last),
            scrambler.i.valid.eq(encoder.o.valid),
            encoder.o.ready.eq(scrambler.i.ready),
            self.i_target.ready.eq(encoder.o.valid & encoder.o.ready & raw.last),
        ]
        with m.If(self.i_target.ready):
            m.d.sync += beat.eq(0)
        wiring.connect(m, scrambler.o, wiring.flipped(self.o))
        return m
