"""Delta beats: the parts of a delta, of 64-bit words, as beats of a port that is wider.

    i_command, i ─ words left, end of a part ─ Widen ─► beats of `ratio` words, strobes; command: first beat, beats

Tiles follow one another, and a beat that two of them share goes out once, with the later one. The header, whose place
is before the first tile's, comes last, in beats of its own: of the beat that they share each has its words strobed.

Contract: parts as DeltaPacker gives them. For each a command with the beats that its last word completes, the last
tile's and the header's last ones although they are not full; none where there is no such beat. Reset drops what is
inside.

Timing: latency LATENCY cycles from a beat's last word to the beat; a word a cycle, and before a delta's first tile one
for each word of the header that is in its beat; back-pressure: yes.
Limits: ports of 128 to 512 bits.
"""

from amaranth import Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.topk import HEADER_BYTES, WORD_BYTES
from nearflash.gateware.gradients.delta import DeltaPart
from nearflash.gateware.stream.gearbox import Widen

__all__ = ["BeatsCommand", "DeltaBeats"]

_HEADER_WORDS = HEADER_BYTES // WORD_BYTES


class BeatsCommand(data.Struct):
    """The next `beats` beats belong to beat `first` of the delta, and those behind it."""

    first: 32
    beats: 32


class DeltaBeats(wiring.Component):
    """Widens the parts of deltas.

    Parameters
    ----------
    ratio : 64-bit words of a beat: 2, 4 or 8.

    Members
    -------
    i_command : In stream of DeltaPart. i : In stream of 64-bit words.
    o_command : Out stream of BeatsCommand. o : Out stream of struct {data: beat, strb: a bit a word}.

    Raises
    ------
    ValueError : another ratio.
    """

    #: Cycles from the last word of a beat to the beat.
    LATENCY = Widen.LATENCY

    def __init__(self, ratio: int) -> None:
        if ratio not in (2, 4, 8):
            raise ValueError(f"ratio must be 2, 4 or 8, not {ratio!r}")
        self.ratio = ratio
        super().__init__(
            {
                "i_command": In(stream.Signature(DeltaPart)),
                "i": In(stream.Signature(64)),
                "o_command": Out(stream.Signature(BeatsCommand)),
                "o": Out(stream.Signature(data.StructLayout({"data": 64 * ratio, "strb": ratio}))),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """A part is taken with its command; blanks fill the beat up to the first tile."""
        m = Module()
        m.submodules.widen = widen = Widen(64, self.ratio, strb_bits=1)
        part, command = self.i_command.payload, self.o_command.payload
        shift = self.ratio.bit_length() - 1
        left, last, blanks = Signal(32), Signal(), Signal(range(self.ratio))
        end, beats, idle = Signal(32), Signal(32), Signal()
        open_beat = Signal()  # its last word is there, but the beat is not full
        m.d.comb += [
            idle.eq((left == 0) & (blanks == 0)),
            end.eq(part.first + part.words),
            open_beat.eq(part.last & (end[:shift] != 0)),
            beats.eq((end >> shift) - (part.first >> shift) + open_beat),
            command.first.eq(part.first >> shift),
            command.beats.eq(beats),
            self.o_command.valid.eq(self.i_command.valid & idle & (beats != 0)),
            self.i_command.ready.eq(idle & (self.o_command.ready | (beats == 0))),
        ]
        with m.If(self.i_command.valid & self.i_command.ready):
            m.d.sync += [left.eq(part.words), last.eq(part.last)]
            # Words before the first tile are the header's; those before any other part are in the beat already.
            m.d.sync += blanks.eq(Mux(part.first == _HEADER_WORDS, _HEADER_WORDS % self.ratio, 0))

        given, blank = widen.i.payload, Signal()
        m.d.comb += [
            blank.eq(blanks != 0),
            widen.i.valid.eq(blank | ((left != 0) & self.i.valid)),
            self.i.ready.eq(~blank & (left != 0) & widen.i.ready),
            given.data.eq(self.i.payload),
            given.strb.eq(~blank),
            given.last.eq(~blank & last & (left == 1)),
            self.o.valid.eq(widen.o.valid),
            self.o.payload.data.eq(widen.o.payload.data),
            self.o.payload.strb.eq(widen.o.payload.strb),
            widen.o.ready.eq(self.o.ready),
        ]
        with m.If(widen.i.valid & widen.i.ready):
            m.d.sync += [blanks.eq(Mux(blank, blanks - 1, 0)), left.eq(Mux(blank, left, left - 1))]
        return m
