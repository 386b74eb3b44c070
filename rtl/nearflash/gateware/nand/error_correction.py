"""Error correction of one channel: raw codewords in, corrected ones with their page tag out.

    raw ──► Scrambler ──┬─► ring of codewords ──────────────────► read, flip wrong bits ──► page tag, aux, data, CRC
                        └─► Syndromes ──┬─► dirty or clean ─────────┘  ▲
                                        └─► (dirty) shared Corrector ──┘ error positions

A codeword's page tag is written to the ring behind its message, in the beats in which parity comes, and read ahead
of it. Parity itself is not stored.

Contract: codewords leave in order, 68 beats each, corrected where that is possible; the flags are constant over a
codeword. A `failed` one is uncorrectable. `i_page_tag` has one item for each request; it is taken with the `final`
codeword. Reset drops what is inside.

Timing: a clean codeword's first beat leaves LATENCY cycles after its last one came; 69 beats in, 68 out, at full rate;
a dirty one waits for the corrector, behind it the ring takes six more; back-pressure: yes.
"""

from amaranth import Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.codeword import BCH_BITS
from nearflash.gateware.nand.bch.key_equation import SYNDROMES_A_BEAT
from nearflash.gateware.nand.bch.syndromes import SYNDROME_BITS, Syndromes
from nearflash.gateware.nand.codeword import MESSAGE_BEATS, TAGGED_BEATS, ErrorPosition, PageTag, TaggedBeat
from nearflash.gateware.nand.link import RAW_BEATS, RawBeat
from nearflash.gateware.nand.scramble import Scrambler
from nearflash.gateware.stream.queue import StreamQueue

__all__ = ["ErrorCorrection"]

_SLOTS = 7
_WORDS = _SLOTS * TAGGED_BEATS
_BEAT_BITS = BCH_BITS * SYNDROMES_A_BEAT
_SYNDROME_BEATS = SYNDROME_BITS // _BEAT_BITS
_LAST_BEAT_BITS = 48
"""Bits of the last raw beat that belong to the codeword."""
_VERDICT = data.StructLayout({"dirty": 1, "failed": 1})


class ErrorCorrection(wiring.Component):
    """Descrambles codewords, finds out which are dirty and repairs them with what a Corrector says.

    Members
    -------
    i : In stream of RawBeat, 69 beats a codeword.
    i_page_tag : In stream of PageTag, one a request.
    o_syndromes : Out stream of four syndromes, four beats for each dirty codeword.
    i_errors : In stream of ErrorPosition: the answers.
    o : Out stream of TaggedBeat, 68 beats a codeword.
    """

    #: Cycles from the last beat of a clean codeword to its first one on `o`.
    LATENCY = 6

    i: In(stream.Signature(RawBeat))
    i_page_tag: In(stream.Signature(PageTag))
    o_syndromes: Out(stream.Signature(_BEAT_BITS))
    i_errors: In(stream.Signature(ErrorPosition))
    o: Out(stream.Signature(TaggedBeat))

    def elaborate(self, platform: object) -> Module:
        """The ring between both sides: `room` counts its free slots, `whole` those that can be read."""
        m = Module()
        m.submodules.scrambler = scrambler = Scrambler()
        m.submodules.ring = ring = Memory(shape=64, depth=_WORDS, init=[])
        m.submodules.verdicts = verdicts = StreamQueue(_VERDICT, _SLOTS + 2)
        wiring.connect(m, wiring.flipped(self.i), scrambler.i)
        room, whole = Signal(range(_SLOTS + 1), init=_SLOTS), Signal(range(_SLOTS + 1))
        takes, fills, fetches, frees = Signal(), Signal(), Signal(), Signal()
        for count, up, down in ((room, frees, takes), (whole, fills, fetches)):
            # Up and down in one cycle cancel each other.
            with m.If(up != down):
                m.d.sync += count.eq(Mux(up, count + 1, count - 1))
        self._receive(m, scrambler.o, ring.write_port(), verdicts.i, room != 0, takes, fills)
        word = self._fetch(m, ring.read_port(), whole != 0, fetches, frees)
        self._repair(m, word, verdicts.o)
        return m

    def _receive(self, m: Module, raw: stream.Interface, write: Memory, verdicts: stream.Interface, room: Value,
                 takes: Signal, last: Signal) -> None:  # fmt: skip
        """Into the ring, word after word: the message, then the page tag. A codeword starts when a slot is free."""
        m.submodules.syndromes = syndromes = Syndromes()
        beat, address = Signal(range(RAW_BEATS)), Signal(range(_WORDS))
        moves = Signal()
        page_tag = self.i_page_tag.payload.block(raw.payload.number)
        m.d.comb += [
            raw.ready.eq((beat != 0) | (room & self.i_page_tag.valid)),
            moves.eq(raw.valid & raw.ready),
            takes.eq(moves & (beat == 0)),
            last.eq(moves & raw.payload.last),
            self.i_page_tag.ready.eq(last & raw.payload.final),
            write.addr.eq(address),
            write.en.eq(moves & ~raw.payload.last),
            write.data.eq(raw.payload.data),
            syndromes.enable.eq(moves),
            syndromes.first.eq(beat == 0),
            syndromes.data.eq(raw.payload.data),
        ]
        for number, word in enumerate(page_tag):
            with m.If(beat == MESSAGE_BEATS + number):
                m.d.comb += write.data.eq(word)
        with m.If(raw.payload.last):
            m.d.comb += syndromes.data[_LAST_BEAT_BITS:].eq(0)
        with m.If(moves):
            m.d.sync += beat.eq(Mux(raw.payload.last, 0, beat + 1))
        with m.If(write.en):
            m.d.sync += address.eq(Mux(address == _WORDS - 1, 0, address + 1))
        self._judge(m, syndromes, last, raw.payload.failed, verdicts)

    def _judge(self, m: Module, syndromes: Syndromes, last: Signal, failed: Signal, verdicts: stream.Interface) -> None:
        """A copy of the syndromes, whether they are zero, and the queue of those that are not."""
        m.submodules.waiting = waiting = StreamQueue(_BEAT_BITS, _SYNDROME_BEATS * (_SLOTS + 2))
        ends = Signal(Syndromes.LATENCY + 2)
        copy, copy_failed, dirty = Signal(SYNDROME_BITS, reset_less=True), Signal(), Signal()
        sent, sending = Signal(range(_SYNDROME_BEATS)), Signal()
        m.d.sync += ends.eq((ends << 1) | last)
        with m.If(last):
            # One register for it: the next codeword's last beat is RAW_BEATS away, its verdict comes long before.
            m.d.sync += copy_failed.eq(failed)
        with m.If(ends[-3]):
            m.d.sync += copy.eq(syndromes.o)
        m.d.sync += dirty.eq(copy.any())
        m.d.comb += [
            verdicts.payload.dirty.eq(dirty & ~copy_failed),
            verdicts.payload.failed.eq(copy_failed),
            verdicts.valid.eq(ends[-1]),
            waiting.i.payload.eq(copy.word_select(sent, _BEAT_BITS)),
            # Ready is not asked: the queue has room for every codeword that may have a verdict open.
            waiting.i.valid.eq(sending),
        ]
        with m.If(ends[-1] & verdicts.payload.dirty):
            m.d.sync += sending.eq(1)
        with m.If(sending):
            m.d.sync += sent.eq(sent + 1)
            with m.If(sent == _SYNDROME_BEATS - 1):
                m.d.sync += sending.eq(0)
        wiring.connect(m, waiting.o, wiring.flipped(self.o_syndromes))

    def _fetch(self, m: Module, read: Memory, some: Value, fetches: Signal, frees: Signal) -> stream.Interface:
        """Out of the ring, without a gap between codewords: the page tag, then the message."""
        words = stream.Signature(64).create()
        base, asked, behind = Signal(range(_WORDS)), Signal(range(TAGGED_BEATS)), TAGGED_BEATS - MESSAGE_BEATS
        last = asked == TAGGED_BEATS - 1
        m.d.comb += [
            read.addr.eq(base + Mux(asked < behind, asked + MESSAGE_BEATS, asked - behind)),
            read.en.eq(((asked != 0) | some) & (~words.valid | words.ready)),
            words.payload.eq(read.data),
            fetches.eq(read.en & (asked == 0)),
            # The slot is written a cycle later at the earliest: `room` is a register.
            frees.eq(read.en & last),
        ]
        with m.If(~words.valid | words.ready):
            m.d.sync += words.valid.eq(read.en)
        with m.If(read.en):
            m.d.sync += asked.eq(Mux(last, 0, asked + 1))
            with m.If(last):
                m.d.sync += base.eq(Mux(base == _WORDS - TAGGED_BEATS, 0, base + TAGGED_BEATS))
        return words

    def _repair(self, m: Module, words: stream.Interface, verdicts: stream.Interface) -> None:
        """A word waits for its codeword's verdict, and until its wrong bits are flipped, one a cycle.

        An item that says uncorrectable stays until the codeword has left; behind the message come errors in the parity.
        """
        word, full, number = Signal(64, reset_less=True), Signal(), Signal(range(TAGGED_BEATS))
        fixed, open_, at_bit, moves = Signal(), Signal(), Signal(), Signal()
        error, errors, verdict = self.i_errors.payload, self.i_errors, verdicts.payload
        behind, last = TAGGED_BEATS - MESSAGE_BEATS, number == TAGGED_BEATS - 1
        pending = verdict.dirty & ~fixed
        flips = errors.valid & pending & ~error.uncorrectable & full
        m.d.comb += [
            open_.eq(verdicts.valid & (~pending | errors.valid)),
            at_bit.eq(open_ & flips & (error.position[6:] + behind == number)),
            errors.ready.eq(at_bit | (open_ & last & pending & full & (flips | moves))),
            self.o.payload.data.eq(word),
            self.o.payload.corrected.eq(verdict.dirty & (fixed | ~error.uncorrectable)),
            self.o.payload.uncorrectable.eq(verdict.failed | (pending & error.uncorrectable)),
            self.o.valid.eq(full & open_ & ~at_bit & ~(last & flips)),
            moves.eq(self.o.valid & self.o.ready),
            verdicts.ready.eq(moves & last),
            words.ready.eq(~full | moves),
        ]
        with m.If(words.ready):
            m.d.sync += [full.eq(words.valid), word.eq(words.payload)]
        with m.Elif(at_bit):
            m.d.sync += word.eq(word ^ (1 << error.position[:6]))
        with m.If(moves):
            m.d.sync += number.eq(Mux(last, 0, number + 1))
        with m.If(moves & last):
            m.d.sync += fixed.eq(0)
        with m.Elif(errors.valid & errors.ready & error.last):
            m.d.sync += fixed.eq(1)
