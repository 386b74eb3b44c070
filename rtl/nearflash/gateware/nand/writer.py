"""Writer: from sealed codewords to raw ones, as they go to NAND.

    sealed ──► Encoder ──► Scrambler ──► raw

Contract: codewords leave in order, 69 beats each, beat by beat as they come. Reset drops the codeword inside.

Timing: 138 cycles a codeword; back-pressure: yes.
Numerics: equals nearflash.model.nand.codeword.raw_codewords to the bit.
"""

from amaranth import Module
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.nand.bch.encoder import Encoder
from nearflash.gateware.nand.link import RawBeat
from nearflash.gateware.nand.scramble import Scrambler

__all__ = ["CodewordWriter", "WriteTarget"]


class WriteTarget(data.Struct):
    """Target of a codeword."""

    number: 6
    place: 5
    lun: 8
    row: 32
    final: 1


class CodewordWriter(wiring.Component):
    """Encodes and scrambles sealed codewords.

    Members
    -------
    i_target : In stream of WriteTarget, one a codeword.
    i : In stream of 64 bits, 66 beats a codeword: aux, data, CRC.
    o : Out stream of RawBeat, 69 beats a codeword.
    """

    i_target: In(stream.Signature(WriteTarget))
    i: In(stream.Signature(64))
    o: Out(stream.Signature(RawBeat))

    def elaborate(self, platform: object) -> Module:
        """The target stays until its codeword's last beat has left the encoder."""
        m = Module()
        m.submodules.encoder = encoder = Encoder()
        m.submodules.scrambler = scrambler = Scrambler()
        target, raw, encoded = self.i_target, scrambler.i, encoder.o
        wiring.connect(m, wiring.flipped(self.i), encoder.i)
        wiring.connect(m, scrambler.o, wiring.flipped(self.o))
        m.d.comb += [
            *(raw.payload[name].eq(target.payload[name]) for name in ("number", "place", "lun", "row", "final")),
            *(raw.payload[name].eq(encoded.payload[name]) for name in ("data", "first", "last")),
            raw.valid.eq(encoded.valid & target.valid),
            encoded.ready.eq(raw.ready & target.valid),
            target.ready.eq(raw.valid & raw.ready & encoded.payload.last),
        ]
        return m
