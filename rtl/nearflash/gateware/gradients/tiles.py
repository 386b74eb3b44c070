"""Tile check of Top-K gradient streams: sections to their queues, tiles released once they are known to be good.

                  ┌─► o_index, rows of four 12-bit indices
    i ─► IndexCheck ─► o_value, words of values
     │            └─► o_tile, when a tile's last word was checked: whether it has pairs
     └─► message ─► checksum

Contract: a command takes exactly its words, while there are `more`. `fault` is the first one in stream order, and
within a tile the first of CHECKSUM, ORDER, RANGE, LENGTH. The tile it is in and those behind it are released as tiles
without pairs, though words of theirs may have left on `o_index` and `o_value`. `fault` stands until the next command.
Reset drops what is inside.

Timing: a word a cycle; a tile is released LATENCY cycle after its last word; back-pressure: yes.
Source: nearflash.abi.topk.
"""

from typing import Any

from amaranth import C, Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.topk import TILE_BITS, TILE_PARAMS, StreamFault, ValueFormat
from nearflash.gateware.coding.kept_net import equal
from nearflash.gateware.gradients.header import TilesCommand, tiles_of
from nearflash.gateware.gradients.indices import IndexCheck
from nearflash.gateware.gradients.values import ROW_PAIRS, ValueWord

__all__ = ["IndexRow", "Tile", "TileCheck"]

_ROW_BITS = ROW_PAIRS.bit_length() - 1
_KEPT = data.StructLayout({"count": TILE_BITS + 1, "crc": 32, "last": 1})
"""Of a tile: what its word says, and whether it is the stream's last one."""


class IndexRow(data.Struct):
    """Four indices, which of them are there, and whether the tile has no further ones."""

    index: ROW_PAIRS * TILE_BITS
    there: ROW_PAIRS
    last: 1


class Tile(data.Struct):
    """Whether a tile has pairs, and whether it is the stream's last one."""

    pairs: 1
    last: 1


class TileCheck(wiring.Component):
    """Takes tiles apart.

    Members
    -------
    i_start : In stream of TilesCommand, of some parameters; taken when the words of the one before were. Its payload
        stands until the next one. more : In, it has words that are still to come.
    i : In stream of 64-bit words.
    o_index : Out stream of IndexRow. o_value : Out stream of ValueWord.
    o_tile : Out stream of Tile: all those that the parameters have.
    room : In, `o_tile` takes two tiles or more.
    message : Out, 64 bits of the message of the checksum, for the word on `i`. begins : Out, it is the message's first.
    crc : In, CRC32C of the message up to the last word that was taken.
    fault : Out, stands until the next command.
    idle : Out, all words of the command were taken and checked.
    """

    #: Cycles from a tile's last word to `o_tile`.
    LATENCY = 1

    i_start: In(stream.Signature(TilesCommand))
    more: In(1)
    i: In(stream.Signature(64))
    o_index: Out(stream.Signature(IndexRow))
    o_value: Out(stream.Signature(ValueWord))
    o_tile: Out(stream.Signature(Tile))
    room: In(1)
    message: Out(64)
    begins: Out(1)
    crc: In(32)
    fault: Out(StreamFault)
    idle: Out(1)

    def elaborate(self, platform: object) -> Module:
        """States that take words; beside them the checks, whose verdict comes a cycle after a tile's last word."""
        m = Module()
        m.submodules.indices = indices = IndexCheck()
        start, word = self.i_start.payload, self.i.payload
        tile = Signal(_KEPT, reset_less=True)
        number = Signal(32 - TILE_BITS, reset_less=True)  # of a tile of at most 2^32 parameters
        pairs = Signal(32, reset_less=True)  # of all tiles so far
        judge = Signal()
        taken, ends, inside = Signal(), Signal(), Signal()
        place = _Place(m, tile.count, start.value_format)
        row = self.o_index.payload
        m.d.comb += [
            taken.eq(self.i.valid & self.i.ready),
            row.index.eq(Cat(word.word_select(k, 16)[:TILE_BITS] for k in range(ROW_PAIRS))),
            row.there.eq(Mux(place.last_row & (place.part != 0), ~(C(15, 4) << place.part), -1)),
            row.last.eq(place.last_row),
            self.o_value.payload.data.eq(word),
            self.o_value.payload.last.eq(place.last_word),
            self.message.eq(Mux(self.begins, Cat(number, C(0, TILE_BITS), word[:32]), word)),
            indices.begin.eq(taken & self.begins),
            indices.enable.eq(taken & inside),
            indices.word.eq(word),
            indices.there.eq(row.there),
            indices.stop.eq(Mux(tile.last, start.params[:TILE_BITS], 0)),
        ]
        m.d.sync += judge.eq(ends)
        with m.If(ends):
            m.d.sync += number.eq(number + 1)
        with m.If(taken & self.begins):
            m.d.sync += pairs.eq(pairs + word[: TILE_BITS + 1])
        with m.If(self.i_start.valid & self.idle):
            m.d.sync += [number.eq(0), pairs.eq(0)]
        self._states(m, tile, number, place, taken, ends, inside)
        self._judge(m, judge, tile, indices, self.more | ~equal(m, pairs, start.pairs))
        return m

    def _states(
        self, m: Module, tile: Any, number: Signal, place: "_Place", taken: Signal, ends: Signal,
        inside: Signal,
    ) -> None:  # fmt: skip
        """Which section words belong to. `ends`: a tile, for good or as one that is dropped; `inside`: its indices."""
        start = self.i_start.payload
        count, last, stop = self.i.payload[:16], Signal(), Signal()
        over = Signal()  # all tiles were
        m.d.comb += [
            last.eq(equal(m, (number + 1)[: len(number)], tiles_of(start.params)[: len(number)])),
            stop.eq(~self.more | (self.fault != StreamFault.NONE)),
        ]
        with m.If(ends):
            m.d.sync += [tile.last.eq(last), over.eq(last)]
        with m.FSM():
            with m.State("WAIT-COMMAND"):
                m.d.comb += [self.idle.eq(1), self.i_start.ready.eq(1)]
                with m.If(self.i_start.valid):
                    m.d.sync += [over.eq(0), self.fault.eq(start.fault)]
                    m.next = "TILE-WORD"
            with m.State("TILE-WORD"):
                m.d.comb += [self.begins.eq(1), self.i.ready.eq(self.room & ~stop), ends.eq(taken & (count == 0))]
                m.d.comb += [place.begins.eq(taken), place.whole.eq(count[:_ROW_BITS] == 0)]
                with m.If(taken):
                    self._tile_word(m, tile)
                    m.next = "INDICES"
                    with m.If(count == 0):
                        m.next = "TILE-WORD"
                        with m.If(last):
                            m.next = "DRAIN"
                self._stop(m, stop)
            with m.State("INDICES"):
                m.d.comb += inside.eq(1)
                m.d.comb += [self.o_index.valid.eq(self.i.valid & ~stop), self.i.ready.eq(self.o_index.ready & ~stop)]
                m.d.comb += [place.taken.eq(taken), place.begins.eq(taken & place.last_row)]
                m.d.comb += place.whole.eq(place.part == 0)
                with m.If(taken & place.last_row):
                    m.next = "VALUES"
                self._stop(m, stop)
            with m.State("VALUES"):
                m.d.comb += [self.o_value.valid.eq(self.i.valid & ~stop), self.i.ready.eq(self.o_value.ready & ~stop)]
                m.d.comb += ends.eq(taken & place.last_word)
                m.d.comb += [place.taken.eq(taken), place.values.eq(1)]
                with m.If(ends):
                    m.next = "TILE-WORD"
                    with m.If(last):
                        m.next = "DRAIN"
                self._stop(m, stop)
            with m.State("DRAIN"):
                m.d.comb += [self.i.ready.eq(self.more), ends.eq(~over & self.room)]
                with m.If(~self.more & over):
                    m.next = "WAIT-COMMAND"

    def _tile_word(self, m: Module, tile: Any) -> None:
        """Keep what it says; a count that cannot be is a fault."""
        word = self.i.payload
        count = word[:16]
        m.d.sync += [tile.count.eq(count), tile.crc.eq(word[32:])]
        with m.If(count > TILE_PARAMS):
            m.d.sync += self.fault.eq(StreamFault.COUNT)

    def _stop(self, m: Module, stop: Signal) -> None:
        """In a state within tiles: no words any more, or a fault."""
        with m.If(stop):
            with m.If(self.fault == StreamFault.NONE):
                m.d.sync += self.fault.eq(StreamFault.LENGTH)
            m.next = "DRAIN"

    def _judge(self, m: Module, judge: Signal, tile: Any, indices: IndexCheck, rest: Any) -> None:
        """Release a tile, or say what is wrong with it; an earlier fault wins over what the states have found."""
        fault = Signal(StreamFault)
        sound = self.fault == StreamFault.NONE
        for wrong, kind in (
            (tile.last & rest, StreamFault.LENGTH),
            (indices.beyond, StreamFault.RANGE),
            (indices.unordered, StreamFault.ORDER),
            (~equal(m, self.crc, tile.crc), StreamFault.CHECKSUM),
        ):
            with m.If(wrong):
                m.d.comb += fault.eq(kind)
        m.d.comb += [
            self.o_tile.valid.eq(judge),
            self.o_tile.payload.pairs.eq((tile.count != 0) & sound & (fault == StreamFault.NONE)),
            self.o_tile.payload.last.eq(tile.last),
        ]
        with m.If(judge & sound & (fault != StreamFault.NONE)):
            m.d.sync += self.fault.eq(fault)


class _Place:
    """Place of a word in a section: rows of four that are done, one more for a section of whole rows.

    So that the last row is that of number count // 4, whether it is whole or not; of fp32 a word is half a row.
    """

    def __init__(self, m: Module, count: Any, value_format: Any) -> None:
        self.part = count[:_ROW_BITS]
        self.begins, self.whole = Signal(), Signal()  # a section, one of whole rows
        self.taken, self.values = Signal(), Signal()  # a word, and one of values
        self.last_row, self.last_word = Signal(), Signal()
        row = Signal(TILE_BITS + 1 - _ROW_BITS, name="place_row", reset_less=True)
        second = Signal(name="place_second", reset_less=True)
        half = self.values & (value_format == ValueFormat.FP32) & ~second  # the word is the first of a row
        m.d.comb += [
            self.last_row.eq(equal(m, row, count[_ROW_BITS:])),
            self.last_word.eq(self.last_row & (~half | (self.part == 1) | (self.part == 2))),
        ]
        with m.If(self.taken):
            m.d.sync += second.eq(half)
        with m.If(self.taken & ~half):
            m.d.sync += row.eq(row + 1)
        with m.If(self.begins):
            m.d.sync += [row.eq(0), row[0].eq(self.whole), second.eq(0)]
