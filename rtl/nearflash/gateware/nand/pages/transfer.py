"""Page transfer: the codewords of one page between memory and a channel, checked on the way.

    memory ──┐                       ┌──► CodewordWriter ──► NAND        (program)
             ├─► register ─► SealCheck
    NAND ────┘ (page tags dropped)└──► memory                         (read)

Contract: `start` begins a page, `done` pulses when its last beat has moved; `task` must stand still in between. The
flags are those of the page at `done`, until the next `start`. A page that is not to be kept moves too, to keep its
channel going: what is programmed means nothing, what is read is dropped.

Timing: 138 cycles a codeword for programs, 68 for reads; back-pressure: yes.
Numerics: equals nearflash.model.nand.codeword: raw (programs); reads give the sealed codewords, bits corrected.
"""

from amaranth import Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.nand.codeword import TAGGED_BEATS, PageTag, TaggedBeat
from nearflash.gateware.nand.seal_check import SealCheck
from nearflash.gateware.nand.writer import CodewordWriter

__all__ = ["PageTask", "PageTransfer"]


class PageTask(data.Struct):
    """A page, and which way it goes."""

    read: 1
    keep: 1
    page_tag: PageTag
    second: 1
    """Its codewords are numbered after those of another page."""
    codewords: 6
    lun: 8
    row: 32


class PageTransfer(wiring.Component):
    """Moves one page at a time.

    Members
    -------
    start : In, pulse. task : In, PageTask. done : Out, pulse.
    uncorrectable, misdirected : Out, what a codeword of the page was.
    i_memory : In stream of 64 bits, o_memory : Out stream of 64 bits: sealed codewords.
    i_nand : In stream of TaggedBeat. o_nand : Out stream of 64 bits, raw codewords.
    """

    start: In(1)
    task: In(PageTask)
    done: Out(1)
    uncorrectable: Out(1)
    misdirected: Out(1)
    i_memory: In(stream.Signature(64))
    o_memory: Out(stream.Signature(64))
    i_nand: In(stream.Signature(TaggedBeat))
    o_nand: Out(stream.Signature(64))

    def elaborate(self, platform: object) -> Module:
        """Source, register, check, sink."""
        m = Module()
        m.submodules.check = check = SealCheck()
        m.submodules.writer = writer = CodewordWriter()
        task, running, ends = self.task, Signal(), Signal()
        through = Signal()  # all codewords have passed the check
        number, place = Signal(5), Signal(5)  # of the codeword in the check; in the writer
        closing = (number == task.codewords - 1) & check.o.payload.last  # what the check has is the page's last beat
        self._take(m, check, running & ~through, closing)
        m.d.comb += [
            check.i_page_tag.valid.eq(running & ~through),
            check.i_page_tag.payload.page.eq(task.page_tag),
            check.i_page_tag.payload.number.eq(number | Mux(task.second, task.codewords, 0)),
            writer.i_target.valid.eq(running & ~task.read),
            writer.i_target.payload.place.eq(place),
            writer.i_target.payload.final.eq(place == task.codewords - 1),
            *(writer.i_target.payload[name].eq(task[name]) for name in ("lun", "row")),
        ]
        with m.If(check.i_page_tag.valid & check.i_page_tag.ready):
            m.d.sync += [number.eq(number + 1), through.eq(closing)]
        with m.If(writer.i_target.valid & writer.i_target.ready):
            m.d.sync += place.eq(place + 1)

        beat, raw = check.o.payload, writer.o
        m.d.comb += [
            self.o_memory.payload.eq(Mux(beat.last, beat.data[:32], beat.data)),  # parity lies behind the CRC
            self.o_memory.valid.eq(check.o.valid & task.read & task.keep),
            writer.i.payload.eq(beat.data),
            writer.i.valid.eq(check.o.valid & ~task.read),
            check.o.ready.eq(Mux(task.read, self.o_memory.ready | ~task.keep, writer.i.ready)),
            self.o_nand.payload.eq(raw.payload.data),
            self.o_nand.valid.eq(raw.valid),
            raw.ready.eq(self.o_nand.ready),
            ends.eq(raw.valid & raw.ready & raw.payload.last & raw.payload.final),
            self.done.eq(running & Mux(task.read, through, ends)),
        ]
        with m.If(self.start):
            m.d.sync += [running.eq(1), through.eq(0), number.eq(0), place.eq(0)]
        with m.Elif(self.done):
            m.d.sync += running.eq(0)
        return m

    def _take(self, m: Module, check: SealCheck, running: Value, closing: Value) -> None:
        """From the source into a register; what a codeword was, as it leaves that."""
        task, held, full = self.task, Signal(TaggedBeat, reset_less=True), Signal()
        beat, room, takes, tagged = Signal(range(TAGGED_BEATS)), Signal(), Signal(), Signal()
        m.d.comb += [
            room.eq(~full | check.i.ready),
            takes.eq(running & room & ~(full & closing)),
            tagged.eq(beat < 2),
            self.i_nand.ready.eq(takes & task.read),
            self.i_memory.ready.eq(takes & ~task.read & task.keep),
            check.i.payload.eq(held.data),
            check.i.valid.eq(full),
        ]
        with m.If(room):
            there = Mux(task.read, self.i_nand.valid & ~tagged, self.i_memory.valid | ~task.keep)
            m.d.sync += full.eq(takes & there)
            m.d.sync += held.eq(self.i_nand.payload)
            with m.If(~task.read):
                m.d.sync += [held.data.eq(self.i_memory.payload), held.corrected.eq(0), held.uncorrectable.eq(0)]
        with m.If(self.i_nand.valid & self.i_nand.ready):
            m.d.sync += beat.eq(Mux(beat == TAGGED_BEATS - 1, 0, beat + 1))
        with m.If(full & held.uncorrectable | check.wrong & held.corrected):
            m.d.sync += self.uncorrectable.eq(1)
        with m.If(check.wrong & ~held.corrected & ~held.uncorrectable):
            m.d.sync += self.misdirected.eq(1)
        with m.If(self.start):
            m.d.sync += [full.eq(0), beat.eq(0), self.uncorrectable.eq(0), self.misdirected.eq(0)]
