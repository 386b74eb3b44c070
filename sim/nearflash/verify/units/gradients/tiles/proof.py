"""Proof of the tile check of Top-K streams."""

from typing import Any

from amaranth.hdl import Array, Cat, Const, Mux, Signal

from nearflash.abi.topk import TILE_BITS, TILE_PARAMS, StreamFault, ValueFormat
from nearflash.gateware.coding.crc import Crc32c
from nearflash.gateware.gradients.tiles import TileCheck
from nearflash.verify.proofs.harness import ProofHarness
from nearflash.verify.proofs.proof import Proof
from nearflash.verify.proofs.properties import accept, check_source, moves, offer

__all__ = ["PROOF", "build_proof"]


class _Reference:
    """Rest of a command and of its tile, and what is wrong, by what has moved."""

    def __init__(self, harness: ProofHarness, dut: Any) -> None:
        def keep(shape: int) -> Any:
            return Signal(shape, reset_less=True)

        self.words, self.params, self.pairs = Signal(29), Signal(32), Signal(32)
        self.number, self.form = keep(32 - TILE_BITS), dut.i_start.payload.value_format
        self.fault, self.finished = Signal(StreamFault), Signal()
        self.rows, self.values = Signal(13), Signal(13)  # words that are due
        self.count, self.limit, self.crc_said = keep(13), keep(13), keep(32)
        self.ended, self.last = Signal(), keep(1)  # the tile of the cycle before; it was the last one
        self.some, self.before, self.unordered, self.beyond = keep(1), keep(16), keep(1), keep(1)
        harness.m.submodules.crc = self.crc = Crc32c()

        data, word = dut.i.payload, moves(dut.i)
        self.state = harness.probe("fsm_state", 3)
        self.active = ~dut.idle
        self.sound = self.fault == StreamFault.NONE
        self.skips = (self.state == 3) & ~self.finished & dut.room  # a tile that is dropped
        self.over = self.finished | ~self.sound
        self.due = (self.rows != 0) | (self.values != 0)
        self.first = word & ~self.over & ~self.due
        self.in_rows = word & ~self.over & (self.rows != 0)
        self.in_values = word & ~self.over & (self.rows == 0) & (self.values != 0)
        self.ends = (self.first & (data[:16] == 0)) | (self.in_values & (self.values == 1))
        self.there = Mux((self.rows == 1) & (self.count[:2] != 0), (1 << self.count[:2]) - 1, 15)[:4]
        self.indices = [data.word_select(k, 16) for k in range(4)]
        self.start_words = harness.free(29, "start_words")
        self._take_words(harness.m, data, word)
        self._take_indices(harness.m)
        self._judge(harness.m, data)
        self._begin(harness.m, dut)

    def _take_words(self, m: Any, data: Any, word: Any) -> None:
        stated = data[:16]
        m.d.comb += [
            self.crc.enable.eq(word),
            self.crc.first.eq(self.first),
            self.crc.data.eq(Mux(self.first, Cat(self.number, Const(0, TILE_BITS), data[:32]), data)),
        ]
        self.goes = self.ends | self.skips
        m.d.sync += [
            self.words.eq(self.words - word),
            self.rows.eq(self.rows - self.in_rows),
            self.values.eq(self.values - self.in_values),
            self.ended.eq(self.goes),
        ]
        with m.If(self.goes):
            m.d.sync += [self.params.eq(self.params - TILE_PARAMS), self.number.eq(self.number + 1)]
            m.d.sync += [signal.eq(self.params <= TILE_PARAMS) for signal in (self.last, self.finished)]
        with m.If(self.first):
            m.d.sync += [
                self.count.eq(stated),
                self.rows.eq((stated + 3) >> 2),
                self.values.eq(self.value_words(stated)),
                self.limit.eq(Mux(self.params < TILE_PARAMS, self.params, TILE_PARAMS)),
                self.crc_said.eq(data[32:]),
                self.pairs.eq(self.pairs - stated),
                *(signal.eq(0) for signal in (self.some, self.before, self.unordered, self.beyond)),
            ]

    def value_words(self, count: Any) -> Any:
        return Mux(self.form == ValueFormat.FP32, (count + 1) >> 1, (count + 3) >> 2)

    def _take_indices(self, m: Any) -> None:
        with m.If(self.in_rows):
            m.d.sync += [self.some.eq(1), self.before.eq(Array(self.indices)[sum(self.there) - 1])]
            for index, then, there, known in zip(
                self.indices, [self.before, *self.indices], self.there, (self.some, 1, 1, 1), strict=False
            ):
                with m.If(there & (index <= then) & known):
                    m.d.sync += self.unordered.eq(1)
                with m.If(there & (index >= self.limit)):
                    m.d.sync += self.beyond.eq(1)

    def _judge(self, m: Any, data: Any) -> None:
        """The first fault of a tile, in their order; an early end, a count that cannot be."""
        verdict = Signal(StreamFault)
        for wrong, kind in (
            (self.last & ((self.words != 0) | (self.pairs != 0)), StreamFault.LENGTH),
            (self.beyond, StreamFault.RANGE),
            (self.unordered, StreamFault.ORDER),
            (self.crc.o != self.crc_said, StreamFault.CHECKSUM),
        ):
            with m.If(wrong):
                m.d.comb += verdict.eq(kind)
        judged = self.ended & self.sound
        self.right = judged & (verdict == StreamFault.NONE)
        with m.If(judged & ~self.right):
            m.d.sync += self.fault.eq(verdict)
        with m.Elif(self.active & ~self.over & (self.words == 0)):
            m.d.sync += self.fault.eq(StreamFault.LENGTH)
        with m.Elif(self.first & (data[:16] > TILE_PARAMS)):
            m.d.sync += self.fault.eq(StreamFault.COUNT)

    def _begin(self, m: Any, dut: Any) -> None:
        start = dut.i_start.payload
        with m.If(moves(dut.i_start)):
            m.d.sync += [
                *(getattr(self, name).eq(start[name]) for name in ("params", "pairs", "fault")),
                self.words.eq(self.start_words),
                *(signal.eq(0) for signal in (self.number, self.finished, self.rows, self.values)),
            ]


def build_proof(dut: Any = None) -> ProofHarness:
    """Words go where their section goes; a tile is released when all of it is right; the first fault stands."""
    dut = TileCheck() if dut is None else dut
    harness = ProofHarness(dut)
    start, row, value = dut.i_start.payload, dut.o_index.payload, dut.o_value.payload
    tile = dut.o_tile.payload
    offer(harness, dut.i_start, "i_start")
    offer(harness, dut.i)
    for name in ("o_index", "o_value"):
        accept(harness, getattr(dut, name), name)
        check_source(harness, getattr(dut, name), name)
    harness.assume((start.params != 0) & (start.value_format < len(ValueFormat)) & (start.fault < len(StreamFault)))
    space = Signal(2, init=3)  # places for tiles
    harness.m.d.sync += space.eq(space - moves(dut.o_tile) + (harness.free(1, "frees") & ~space.all()))
    harness.m.d.comb += [dut.room.eq(space >= 2), dut.o_tile.ready.eq(space != 0)]

    ref = _Reference(harness, dut)
    active, over, left = ref.active, ref.over, ref.words != 0
    harness.m.d.comb += [dut.more.eq(left), dut.crc.eq(ref.crc.o)]
    harness.assume(~active | (start.as_value() == harness.past(start.as_value(), "start_past")))
    here = dut.i.valid & ~over & left
    harness.prove("no_word_of_another_command", ~dut.i.ready | (active & left))
    harness.prove("indices_to_their_queue", dut.o_index.valid == (here & (ref.rows != 0)))
    harness.prove("values_to_their_queue", dut.o_value.valid == (here & (ref.rows == 0) & (ref.values != 0)))
    harness.prove("words_taken_once", (moves(dut.o_index) == ref.in_rows) & (moves(dut.o_value) == ref.in_values))
    harness.prove("same_indices", ~dut.o_index.valid | (row.index == Cat(index[:TILE_BITS] for index in ref.indices)))
    harness.prove("indices_there", ~dut.o_index.valid | ((row.there == ref.there) & (row.last == (ref.rows == 1))))
    harness.prove("same_values", ~dut.o_value.valid | (value.data == dut.i.payload) & (value.last == (ref.values == 1)))
    harness.prove("same_message", ~moves(dut.i) | (dut.begins == ref.first) & (dut.message == ref.crc.data))
    harness.prove("every_tile_is_released", dut.o_tile.valid == ref.ended)
    harness.prove("with_pairs_when_all_is_right", ~dut.o_tile.valid | (tile.pairs == (ref.right & (ref.count != 0))))
    harness.prove("the_last_tile", ~dut.o_tile.valid | (tile.last == ref.last))
    harness.prove("a_tile_has_room", ~dut.o_tile.valid | dut.o_tile.ready)
    harness.prove("the_first_fault_stands", dut.fault == ref.fault)
    harness.prove("idle_when_all_was_taken", active | (~left & ~ref.ended))
    harness.prove("next_command_when_idle", dut.i_start.ready == dut.idle)
    harness.prove("takes_a_tile_word", ~(active & ~over & left & dut.room & ~ref.due) | dut.i.ready)
    drops = harness.past(active & over, "over_before")
    rests = harness.past(drops & ~left & ref.finished, "rested")
    harness.prove("drops_the_rest", ~(drops & active & over & left) | dut.i.ready)
    harness.prove("drops_the_tiles", ~(drops & active & ~ref.finished & dut.room) | ref.skips)
    harness.prove("drops_no_good_tile", ~ref.skips | ~ref.sound)
    harness.prove("comes_to_an_end", ~(drops & rests & over) | dut.idle)
    harness.no_paths += [(dut.o_index.ready, dut.o_value.valid), (dut.i.valid, dut.i.ready)]
    harness.cover("a_tile_of_five_pairs", moves(dut.o_tile) & tile.pairs & (ref.count == 5))
    harness.cover("ends_within_a_tile", (ref.fault == StreamFault.LENGTH) & (ref.rows == 1))
    harness.cover("out_of_order", (ref.fault == StreamFault.ORDER) & (ref.words == 1))
    _invariants(harness, dut, ref, space)
    return harness


def _invariants(harness: ProofHarness, dut: Any, ref: _Reference, space: Any) -> None:
    """Assert what the registers inside hold, by what was seen outside."""
    state, due, start = ref.state, Mux(ref.rows != 0, 2, Mux(ref.values != 0, 4, 1)), dut.i_start.payload
    harness.prove("inner_idle", (state == 0) == dut.idle)
    harness.prove("inner_states", state <= 4)
    harness.prove("inner_state", ~ref.active | ~ref.sound | (state == Mux(ref.finished, 3, due)))
    harness.prove("inner_finished", ~ref.finished | ~ref.due | ~ref.sound)
    values_due = (ref.values == ref.value_words(ref.count)) & (ref.count != 0)
    harness.prove("inner_values", ~ref.active | ref.over | (ref.rows == 0) | values_due)
    harness.prove("inner_sizes", ~ref.sound | ((ref.rows <= TILE_PARAMS // 4) & (ref.values <= TILE_PARAMS // 2)))
    held = {
        "over": ref.finished,
        "tile.count": ref.count,
        "tile.crc": ref.crc_said,
        "tile.last": ref.last,
        "number": ref.number,
        "judge": ref.ended,
        "indices.some": ref.some,
        "indices.before": ref.before,
        "indices.unordered": ref.unordered,
    }
    for path, signal in held.items():
        harness.prove("inner_" + path.replace(".", "_"), harness.probe(path, len(signal)) == signal)
    harness.prove(
        "inner_pairs", ~ref.active | ~ref.sound | (harness.probe("pairs", 32) == (start.pairs - ref.pairs)[:32])
    )
    harness.prove("inner_before", ref.some | (ref.before == 0))
    harness.prove("inner_beyond", ref.unordered | (ref.beyond == (ref.some & (ref.before >= ref.limit))))
    params = (start.params - (ref.number << TILE_BITS))[:32]
    tail = Mux(params < TILE_PARAMS, params, TILE_PARAMS)
    harness.prove("inner_params", ~ref.active | ref.finished | (ref.params == params) & (ref.params != 0))
    harness.prove("inner_limit", ~(ref.active & ref.due) | ref.over | (ref.limit == tail))
    short = ref.last & (start.params[:TILE_BITS] != 0)
    limit = Mux(short, start.params[:TILE_BITS], TILE_PARAMS)
    harness.prove("inner_last_limit", ~(ref.ended & ref.sound & (ref.count != 0)) | (ref.limit == limit))
    harness.prove("inner_last", ~ref.ended | (ref.last == ref.finished) | ref.active)
    harness.prove("inner_no_indices", ~(ref.ended & ref.sound & (ref.count == 0)) | ~ref.some)
    harness.prove("inner_indices", ~(ref.ended & ref.sound & (ref.count != 0)) | ref.some)
    harness.prove("inner_space", space >= ref.ended + (ref.due & ~ref.over))
    counted = (ref.count != 0) & (ref.count <= TILE_PARAMS) & (ref.some | (ref.rows != 0))
    harness.prove("inner_count", ~(ref.active & ref.due) | ref.over | counted)
    row, second = harness.probe("place_row", TILE_BITS - 1), harness.probe("place_second", 1)
    rows = (ref.count[2:] + 1 - row)[: TILE_BITS - 1]  # with the one of the word
    harness.prove("inner_rows", ~ref.active | ref.over | (ref.rows == 0) | (rows == ref.rows) & ~second)
    wide = ref.form == ValueFormat.FP32
    words = ((rows - 1) << 1) + Mux((ref.count[:2] == 1) | (ref.count[:2] == 2), 1, 2) - second
    here = Mux(wide, ref.values == words, (ref.values == rows) & ~second)
    harness.prove("inner_words", ~ref.active | ref.over | (ref.rows != 0) | (ref.values == 0) | here)


PROOF = Proof(build_proof, engine="induction", depth=2)
