"""Top-K expander: a stream of sorted pairs to dense fp32 gradients, W a cycle, without touching memory.

    i ─┬─► HeaderCheck ─► TileCheck ─┬─► indices ─► PairDemux, block RAM ─► PairMerge ─► o
       └─► Crc32c                    ├─► ValueRows ────┘                  │
                                     └─► tiles ───────────────────────────┘

A tile waits compressed in memories, which hold the pairs of a full one, until its checksum, order and range were
checked; only then are its pairs merged. No memory of a dense tile is needed, so none has to be cleared either.

Contract: a command takes exactly `stream_bytes` / 8 words from `i` and gives exactly ceil(params / W) groups, the last
one with `last`, whatever the words hold. With a fault nothing of its tile is used, and groups of it and of the tiles
behind it hold zeros: who takes them looks at `fault` before they count for anything. `fault` stands until the next
command. Reset drops what is inside; it needs a reset of what writes to `i`.

Timing: latency LATENCY cycles from the last word of a stream of one tile to its first group; one group a cycle while
words come fast enough; back-pressure: yes. A word a cycle is two pairs of 16-bit values a cycle: at W = 4 no group
waits up to a density of almost 1/2, of 1/3 with fp32 values.
Numerics: exact; equals nearflash.model.gradients.topk.
Source: the format is ours (nearflash.abi.topk). Smart-Infinity (HPCA'24) scatters pairs into cleared device memory.
"""

from amaranth import Module, ResetInserter, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.formats import FP32
from nearflash.abi.topk import StreamFault
from nearflash.gateware.coding.crc import Crc32c
from nearflash.gateware.gradients.header import HeaderCheck, TopKCommand
from nearflash.gateware.gradients.pair_demux import PairDemux
from nearflash.gateware.gradients.pairs import PairMerge
from nearflash.gateware.gradients.tiles import Tile, TileCheck
from nearflash.gateware.gradients.values import ROW_PAIRS, ValueRows
from nearflash.gateware.stream.half import HalfBuffer
from nearflash.gateware.stream.queue import StreamQueue

__all__ = ["TopKExpander"]

_TILES = 8


class TopKExpander(wiring.Component):
    """Expands Top-K gradient streams.

    Parameters
    ----------
    lanes : parameters a cycle (W): 1, 2 or 4.

    Members
    -------
    i_command : In stream of TopKCommand, of some parameters; taken when everything of the one before was.
    i : In stream of 64-bit words.
    o : Out stream of struct {data: lanes · 32 bits, last: 1}.
    fault : Out, StreamFault of the command.
    idle : Out, all words and all groups of the command were taken.

    Raises
    ------
    ValueError : another number of lanes.
    """

    #: Cycles from the last word to the first group.
    LATENCY = TileCheck.LATENCY + StreamQueue.LATENCY["distributed"] + HalfBuffer.LATENCY + PairMerge.LATENCY

    def __init__(self, lanes: int) -> None:
        self._merge = PairMerge(lanes)
        super().__init__(
            {
                "i_command": In(stream.Signature(TopKCommand)),
                "i": In(stream.Signature(64)),
                "o": Out(stream.Signature(data.StructLayout({"data": FP32.bits * lanes, "last": 1}))),
                "fault": Out(StreamFault),
                "idle": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """A fault and what a bad stream left in the queues go when the next command is taken."""
        m = Module()
        begin = Signal()
        fresh = ResetInserter(begin)
        m.submodules.header = header = HeaderCheck()
        m.submodules.crc = crc = Crc32c()
        m.submodules.merge = merge = self._merge
        check, rows, tiles, demux = TileCheck(), ValueRows(), StreamQueue(Tile, _TILES), PairDemux()
        next_tile = HalfBuffer(Tile)  # keeps the merge's ready, which hangs on all pairs, from the queue's counts
        m.submodules.tiles, m.submodules.rows, m.submodules.tile_queue = fresh(check), fresh(rows), fresh(tiles)
        m.submodules.demux, m.submodules.next_tile = fresh(demux), fresh(next_tile)

        for source, sink in (
            (wiring.flipped(self.i), header.i),
            (header.o_start, check.i_start),
            (header.o, check.i),
            (check.o_index, demux.i_index),
            (check.o_value, rows.i),
            (rows.o, demux.i_value),
            (check.o_tile, tiles.i),
            (tiles.o, next_tile.i),
            (next_tile.o, merge.i_tile),
            *((getattr(demux, f"o_{k}"), getattr(merge, f"i_{k}")) for k in range(ROW_PAIRS)),
            (merge.o, wiring.flipped(self.o)),
        ):
            wiring.connect(m, source, sink)
        m.d.comb += [
            begin.eq(self.i_command.valid & self.i_command.ready),
            # Not before the last group has left: what a bad stream left inside is reset with the next command.
            self.i_command.ready.eq(self.idle),
            header.i_command.payload.eq(self.i_command.payload),
            header.i_command.valid.eq(begin),
            merge.i_params.payload.eq(self.i_command.payload.params),
            merge.i_params.valid.eq(begin),
            self.idle.eq(header.i_command.ready & check.idle & merge.idle),
            self.fault.eq(check.fault),
            check.more.eq(header.more),
            # One place less than there are: a tile may be on its way when this is looked at.
            check.room.eq(tiles.level < _TILES - 1),
            rows.value_format.eq(header.o_start.payload.value_format),
            crc.enable.eq(self.i.valid & self.i.ready),
            crc.first.eq(header.begins | check.begins),
            crc.data.eq(check.message),
            header.crc.eq(crc.o),
            check.crc.eq(crc.o),
        ]
        return m
