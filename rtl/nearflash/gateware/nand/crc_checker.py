"""CRC check: holds each codeword back until it is known whether it is whole and whose it is.

    page tag, aux, data, CRC ──┬─► Crc32c ─────────► verdicts ──┐
                                  └─► aux, data ──► queue ─────────┴─► gate ──► CodewordBeat

Contract: codewords leave in order, 65 beats each, none before its CRC was compared. A wrong CRC makes a codeword
misdirected where no bit was wrong (`corrected`, `uncorrectable` clear), uncorrectable where bits were corrected. An
uncorrectable codeword is passed on too, flagged. Reset drops what is inside.

Timing: latency LATENCY from a codeword's last beat to its first one; 68 beats in, 65 out; back-pressure: yes, after
seven codewords.
"""

from amaranth import Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.coding.crc import Crc32c
from nearflash.gateware.nand.codeword import CONTENT_BEATS, TAGGED_BEATS, TaggedBeat
from nearflash.gateware.nand.interfaces import CodewordBeat
from nearflash.gateware.stream.queue import StreamQueue

__all__ = ["CrcChecker"]

_WORDS = 512
_VERDICT = data.StructLayout({"uncorrectable": 1, "misdirected": 1})


class CrcChecker(wiring.Component):
    """Compares the CRC of codewords that come with their page tag.

    Members
    -------
    i : In stream of TaggedBeat, 68 beats a codeword.
    o : Out stream of CodewordBeat, 65 beats a codeword.
    corrected, uncorrectable, misdirected : Out, pulses: a codeword was found to be so.
    """

    #: Cycles from a codeword's last beat on `i` to its first one on `o`.
    LATENCY = 1

    i: In(stream.Signature(TaggedBeat))
    o: Out(stream.Signature(CodewordBeat))
    corrected: Out(1)
    uncorrectable: Out(1)
    misdirected: Out(1)

    def elaborate(self, platform: object) -> Module:
        """The queue's depth of 2^k + 1 fills its block RAM; verdicts have room for every codeword in it."""
        m = Module()
        m.submodules.crc = crc = Crc32c()
        m.submodules.content = content = StreamQueue(64, _WORDS + 1, memory="block")
        m.submodules.verdicts = verdicts = StreamQueue(_VERDICT, _WORDS // CONTENT_BEATS + 3)
        beat = self.i.payload
        number, taken, last = Signal(range(TAGGED_BEATS)), Signal(), Signal()

        m.d.comb += [
            last.eq(number == TAGGED_BEATS - 1),
            # The last word is the CRC: it goes to the verdicts, and not into the queue.
            self.i.ready.eq(Mux(last, verdicts.i.ready, content.i.ready)),
            taken.eq(self.i.valid & self.i.ready),
            content.i.payload.eq(beat.data),
            # The page tag is checked, and stays here.
            content.i.valid.eq(self.i.valid & ~last & (number >= 2)),
            crc.data.eq(beat.data),
            crc.first.eq(number == 0),
            crc.enable.eq(taken),
        ]
        with m.If(taken):
            m.d.sync += number.eq(Mux(last, 0, number + 1))

        wrong = Signal()
        verdict = verdicts.i.payload
        m.d.comb += [
            wrong.eq(crc.o != beat.data[:32]),
            # BCH may "correct" to another codeword: after a correction a wrong CRC is no misdirected page.
            verdict.uncorrectable.eq(beat.uncorrectable | (beat.corrected & wrong)),
            verdict.misdirected.eq(wrong & ~beat.corrected & ~beat.uncorrectable),
            verdicts.i.valid.eq(self.i.valid & last),
            self.corrected.eq(taken & last & beat.corrected & ~verdict.uncorrectable),
            self.uncorrectable.eq(taken & last & verdict.uncorrectable),
            self.misdirected.eq(taken & last & verdict.misdirected),
        ]
        self._gate(m, content.o, verdicts.o)
        return m

    def _gate(self, m: Module, content: stream.Interface, verdicts: stream.Interface) -> None:
        """A codeword leaves once its verdict is there."""
        out, moved = Signal(range(CONTENT_BEATS)), Signal()
        m.d.comb += [
            self.o.payload.data.eq(content.payload),
            self.o.payload.first.eq(out == 0),
            self.o.payload.last.eq(out == CONTENT_BEATS - 1),
            self.o.payload.uncorrectable.eq(verdicts.payload.uncorrectable),
            self.o.payload.misdirected.eq(verdicts.payload.misdirected),
            self.o.valid.eq(content.valid & verdicts.valid),
            moved.eq(self.o.valid & self.o.ready),
            content.ready.eq(moved),
            verdicts.ready.eq(moved & self.o.payload.last),
        ]
        with m.If(moved):
            m.d.sync += out.eq(Mux(self.o.payload.last, 0, out + 1))
