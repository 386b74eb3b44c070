"""Checker of one channel: from raw codewords to checked ones.

    raw ──► ErrorCorrection ─┬─► CrcChecker ──► CodewordBeat
                  ▲ ▼        └─► (aside) o_aside
            shared Corrector

Contract: codewords leave in order, 65 beats each (aux, then data), with `uncorrectable` and `misdirected` constant over
the codeword. Uncorrectable: more bit errors than the code corrects, a wrong CRC after a correction, or a unit that
failed. Misdirected: no bit wrong, and a wrong CRC. While `aside`, codewords leave on `o_aside` instead, corrected, 68
beats each (page tag, aux, data, CRC), no CRC looked at; it changes only while none is inside. Reset drops what is
inside.

Timing: a clean codeword's first beat leaves LATENCY cycles after its last one came; full rate (69 beats in, 65 out)
while codewords are clean; back-pressure: yes.
Numerics: equals nearflash.model.nand.codeword.decode; data of a codeword that is not in order mean nothing.
"""

from amaranth import Module, Mux
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.codeword import BCH_BITS
from nearflash.gateware.nand.bch.key_equation import SYNDROMES_A_BEAT
from nearflash.gateware.nand.codeword import TAGGED_BEATS, ErrorPosition, PageTag, TaggedBeat
from nearflash.gateware.nand.crc_checker import CrcChecker
from nearflash.gateware.nand.error_correction import ErrorCorrection
from nearflash.gateware.nand.interfaces import CodewordBeat
from nearflash.gateware.nand.link import RawBeat
from nearflash.gateware.stream.skid import SkidBuffer

__all__ = ["CodewordChecker"]


class CodewordChecker(wiring.Component):
    """Descrambles, corrects and checks the codewords of a channel.

    Members
    -------
    i : In stream of RawBeat, 69 beats a codeword.
    i_page_tag : In stream of PageTag, one a request (up to and with the `final` codeword).
    o_syndromes, i_errors : streams to and from a channel of CorrectorShare.
    o : Out stream of CodewordBeat, 65 beats a codeword.
    aside : In. o_aside : Out stream of TaggedBeat.
    corrected, uncorrectable, misdirected : Out, pulses: a codeword was found to be so.
    """

    #: Cycles from the last beat of a clean codeword to its first one on `o`.
    LATENCY = ErrorCorrection.LATENCY + TAGGED_BEATS - 1 + CrcChecker.LATENCY

    i: In(stream.Signature(RawBeat))
    i_page_tag: In(stream.Signature(PageTag))
    o_syndromes: Out(stream.Signature(BCH_BITS * SYNDROMES_A_BEAT))
    i_errors: In(stream.Signature(ErrorPosition))
    o: Out(stream.Signature(CodewordBeat))
    aside: In(1)
    o_aside: Out(stream.Signature(TaggedBeat))
    corrected: Out(1)
    uncorrectable: Out(1)
    misdirected: Out(1)

    def elaborate(self, platform: object) -> Module:
        """Two units in a row."""
        m = Module()
        m.submodules.correction = correction = ErrorCorrection()
        m.submodules.crc = crc = CrcChecker()
        wiring.connect(m, wiring.flipped(self.i), correction.i)
        wiring.connect(m, wiring.flipped(self.i_page_tag), correction.i_page_tag)
        wiring.connect(m, correction.o_syndromes, wiring.flipped(self.o_syndromes))
        m.submodules.errors = errors = SkidBuffer(ErrorPosition)  # far from the corrector, and a long way from here on
        wiring.connect(m, wiring.flipped(self.i_errors), errors.i)
        wiring.connect(m, errors.o, correction.i_errors)
        for out, wanted in ((crc.i, ~self.aside), (self.o_aside, self.aside)):
            m.d.comb += [out.payload.eq(correction.o.payload), out.valid.eq(correction.o.valid & wanted)]
        m.d.comb += correction.o.ready.eq(Mux(self.aside, self.o_aside.ready, crc.i.ready))
        wiring.connect(m, crc.o, wiring.flipped(self.o))
        for event in ("corrected", "uncorrectable", "misdirected"):
            m.d.comb += getattr(self, event).eq(getattr(crc, event))
        return m
