"""Tile check of Top-K gradient streams: sections to their queues, tiles released once they are known to be good.

                  ┌─► o_index, rows of four 12-bit indices
    i ─► Crc32c, ─┼─► o_value, words of values
     IndexCheck   └─► o_tile, when a tile's last word was checked: whether it has pairs

Contract: a command takes exactly its words. `fault` is the first one in stream order, and within a tile the first of
CHECKSUM, ORDER, RANGE, LENGTH. The tile it is in and those behind it are not released, though words of theirs may have
left on `o_index` and `o_value`. `fault` stands until the next command. Reset drops what is inside.

Timing: a word a cycle; a tile is released LATENCY cycle after its last word; back-pressure: yes.
Source: nearflash.abi.topk.
"""

from typing import Any

from amaranth import C, Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.topk import TILE_BITS, TILE_PARAMS, StreamFault, ValueFormat
from nearflash.gateware.expand.header import TilesCommand
from nearflash.gateware.expand.indices import COUNT_BITS, IndexCheck
from nearflash.gateware.expand.values import ROW_PAIRS, ValueWord
from nearflash.gateware.nfc.crc import Crc32c

__all__ = ["IndexRow", "TileCheck"]

_TILE = data.StructLayout({"count": COUNT_BITS, "limit": COUNT_BITS, "crc": 32, "last": 1})
"""What a tile's word says, the limit of its indices, and whether it is the stream's last one."""


class IndexRow(data.Struct):
    """Four indices, which of them are there, and whether the tile has no further ones."""

    index: ROW_PAIRS * TILE_BITS
    there: ROW_PAIRS
    last: 1


class TileCheck(wiring.Component):
    """Takes tiles apart.

    Members
    -------
    i_start : In stream of TilesCommand; taken when the words of the one before were.
    i : In stream of 64-bit words.
    o_index : Out stream of IndexRow. o_value : Out stream of ValueWord.
    o_tile : Out stream of one bit for each good tile: it has pairs.
    room : In, `o_tile` takes two tiles or more.
    value_format : Out; fault : Out. Both stand until the next command.
    idle : Out, all words of the command were taken and checked.
    """

    #: Cycles from a tile's last word to `o_tile`.
    LATENCY = 1

    i_start: In(stream.Signature(TilesCommand))
    i: In(stream.Signature(64))
    o_index: Out(stream.Signature(IndexRow))
    o_value: Out(stream.Signature(ValueWord))
    o_tile: Out(stream.Signature(1))
    room: In(1)
    value_format: Out(ValueFormat)
    fault: Out(StreamFault)
    idle: Out(1)

    def elaborate(self, platform: object) -> Module:
        """States that take words; beside them the checks, whose verdict comes a cycle after a tile's last word."""
        m = Module()
        m.submodules.crc = crc = Crc32c()
        m.submodules.indices = indices = IndexCheck()
        left = Signal(TilesCommand)  # parameters, pairs and words that are still to come
        tile = Signal(_TILE, reset_less=True)
        number = Signal(32 - TILE_BITS, reset_less=True)  # of a tile of at most 2^32 parameters
        words = Signal(range(TILE_PARAMS // 2 + 1), reset_less=True)  # of the section that are still to come
        judge = Signal()
        taken, ends, first, inside = Signal(), Signal(), Signal(), Signal()
        word = self.i.payload
        m.d.comb += [
            taken.eq(self.i.valid & self.i.ready),
            self.value_format.eq(left.value_format),
            self.o_index.payload.index.eq(Cat(word.word_select(k, 16)[:TILE_BITS] for k in range(ROW_PAIRS))),
            self.o_index.payload.there.eq(Mux((words == 1) & (tile.count[:2] != 0), ~(C(15, 4) << tile.count[:2]), -1)),
            self.o_index.payload.last.eq(words == 1),
            self.o_value.payload.data.eq(word),
            self.o_value.payload.last.eq(words == 1),
            crc.enable.eq(taken),
            crc.first.eq(first),
            crc.data.eq(Mux(first, Cat(number, C(0, TILE_BITS), word[:32]), word)),
            indices.begin.eq(taken & first),
            indices.count.eq(word[:16]),
            indices.enable.eq(taken & inside),
            indices.word.eq(word),
            indices.limit.eq(tile.limit),
        ]
        m.d.sync += judge.eq(ends)
        with m.If(taken):
            m.d.sync += [left.words.eq(left.words - 1), words.eq(words - 1)]
        self._states(m, left, tile, number, words, taken, ends, first, inside)
        self._judge(m, judge, tile, crc, indices, (left.words != 0) | (left.pairs != 0))
        return m

    def _states(
        self, m: Module, left: Any, tile: Any, number: Signal, words: Signal, taken: Signal, ends: Signal,
        first: Signal, inside: Signal,
    ) -> None:  # fmt: skip
        """Which section words belong to. `ends`: a tile's last word; `first`, `inside`: its word, its indices."""
        count, last, stop = self.i.payload[:16], Signal(), Signal()
        m.d.comb += [
            last.eq(left.params <= TILE_PARAMS),
            stop.eq((left.words == 0) | (self.fault != StreamFault.NONE)),
        ]
        with m.If(ends):
            m.d.sync += [left.params.eq(left.params - TILE_PARAMS), number.eq(number + 1), tile.last.eq(last)]
        with m.FSM():
            with m.State("WAIT-COMMAND"):
                m.d.comb += [self.idle.eq(1), self.i_start.ready.eq(1)]
                with m.If(self.i_start.valid):
                    start = self.i_start.payload
                    m.d.sync += [left.eq(start), number.eq(0), self.fault.eq(start.fault)]
                    m.next = "TILE-WORD"
            with m.State("TILE-WORD"):
                m.d.comb += [first.eq(1), self.i.ready.eq(self.room & ~stop), ends.eq(taken & (count == 0))]
                with m.If(taken):
                    self._tile_word(m, left, tile, words, last)
                    m.next = "INDICES"
                    with m.If(count == 0):
                        m.next = "TILE-WORD"
                        with m.If(last):
                            m.next = "DRAIN"
                self._stop(m, stop)
            with m.State("INDICES"):
                m.d.comb += inside.eq(1)
                m.d.comb += [self.o_index.valid.eq(self.i.valid & ~stop), self.i.ready.eq(self.o_index.ready & ~stop)]
                with m.If(taken & (words == 1)):
                    fp32 = left.value_format == ValueFormat.FP32
                    m.d.sync += words.eq(Mux(fp32, (tile.count + 1) >> 1, _rows(tile.count)))
                    m.next = "VALUES"
                self._stop(m, stop)
            with m.State("VALUES"):
                m.d.comb += [self.o_value.valid.eq(self.i.valid & ~stop), self.i.ready.eq(self.o_value.ready & ~stop)]
                m.d.comb += ends.eq(taken & (words == 1))
                with m.If(ends):
                    m.next = "TILE-WORD"
                    with m.If(last):
                        m.next = "DRAIN"
                self._stop(m, stop)
            with m.State("DRAIN"):
                m.d.comb += self.i.ready.eq(left.words != 0)
                with m.If(left.words == 0):
                    m.next = "WAIT-COMMAND"

    def _tile_word(self, m: Module, left: Any, tile: Any, words: Signal, last: Signal) -> None:
        """Keep what it says; a count that cannot be is a fault."""
        word = self.i.payload
        count = word[:16]
        m.d.sync += [
            tile.count.eq(count),
            tile.crc.eq(word[32:]),
            tile.limit.eq(Mux(last, left.params, TILE_PARAMS)),
            left.pairs.eq(left.pairs - count),
            words.eq(_rows(count)),
        ]
        with m.If(count > TILE_PARAMS):
            m.d.sync += self.fault.eq(StreamFault.COUNT)

    def _stop(self, m: Module, stop: Signal) -> None:
        """In a state within tiles: no words any more, or a fault."""
        with m.If(stop):
            with m.If(self.fault == StreamFault.NONE):
                m.d.sync += self.fault.eq(StreamFault.LENGTH)
            m.next = "DRAIN"

    def _judge(self, m: Module, judge: Signal, tile: Any, crc: Crc32c, indices: IndexCheck, rest: Any) -> None:
        """Release a tile, or say what is wrong with it; an earlier fault wins over what the states have found."""
        fault = Signal(StreamFault)
        m.d.comb += self.o_tile.payload.eq(tile.count != 0)
        for wrong, kind in (
            (tile.last & rest, StreamFault.LENGTH),
            (indices.beyond, StreamFault.RANGE),
            (indices.unordered, StreamFault.ORDER),
            (crc.o != tile.crc, StreamFault.CHECKSUM),
        ):
            with m.If(wrong):
                m.d.comb += fault.eq(kind)
        with m.If(judge & (self.fault == StreamFault.NONE)):
            m.d.comb += self.o_tile.valid.eq(fault == StreamFault.NONE)
            with m.If(fault != StreamFault.NONE):
                m.d.sync += self.fault.eq(fault)


def _rows(count: Any) -> Any:
    """Words of four."""
    return (count + C(ROW_PAIRS - 1, 2)) >> 2
