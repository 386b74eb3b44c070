"""Score path: where approximate scores lie, and what they are: blocks' words, biased, and unindexed suffixes' scores.

    operation ─► buffer of the block ─► address of the accumulators' row
    words of a head, two scores each ─► one of them ─► + bias ─┐
    tail's scores, a token a word ─► memory ─► four in a row ──┴─► o
    factors b ─► bias of the block and head

int4's high tokens were multiplied with code - 8, so they have a bias of their own.

Timing: products come a cycle after their operation; scores are on `o` READ_LATENCY cycles after their operation.
Free-running.
Numerics: integers, least bit 2^-16, exact.
"""

from typing import Any

from amaranth import Cat, Module, Mux, Signal
from amaranth.hdl import Value, signed
from amaranth.lib import data, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.fixed_point import PV_BITS, SCORE_BITS
from nearflash.abi.attention.pages import IndexFormat
from nearflash.gateware.attention.engine.accumulators import BUFFER_WORDS
from nearflash.gateware.attention.engine.beats import Op, OpKind
from nearflash.gateware.attention.engine.blocks import BUFFER_WRITE
from nearflash.gateware.attention.engine.dots import tail_scores
from nearflash.gateware.attention.engine.factors import Factor
from nearflash.gateware.attention.engine.lanes import factor_write
from nearflash.gateware.attention.engine.multiplexer import choose
from nearflash.gateware.attention.numerics.add import PAIR_SHIFT
from nearflash.gateware.attention.numerics.product import PRODUCT
from nearflash.gateware.fp.pipeline import delay, register, wire

__all__ = ["TAIL_ADDRESS", "ScorePath"]

_LANES = 4
_GROUP_MAX = 8
_TAIL_TOKENS = 2 * 64  # two groups
_BUFFER_BITS = (BUFFER_WORDS - 1).bit_length()
TAIL_ADDRESS = 1 << 11
"""In the address of a SCORES operation: of the tail. Its lower bits are then row (4), set of heads (3), group (1)."""


class ScorePath(wiring.Component):
    """Scores of `blocks` buffers and the tail.

    Parameters: heads (G), blocks.
    Members
    -------
    i_buffer : In, BUFFER_WRITE.
    i : In, {valid, op}. address : Out, of its row of scores, in the same cycle.
    product : In, PRODUCT, array of 2: scale and zero of an AUX operation; exceeds : In, a bit for each of G·4 products;
    both a cycle after `i`, as Lanes gives them.
    words : In, of the four lanes of head `element` div 4, as Accumulators gives them.
    i_tail : In, tail_scores: written at once.
    o_factor : Out, factor_write.
    o_fault : Out, the operation of FAULT_LATENCY cycles ago broke the range rule.
    o : Out, {valid, values}, four scores of a head. SCORES: element = half + 4·head; of a tail it is token + 4·head,
    and the four tokens of a row come one after the other.
    """

    #: Cycles from `i` to the fault, whichever kind of operation it was.
    FAULT_LATENCY = 1 + Factor.LATENCY
    READ_LATENCY = 3

    def __init__(self, heads: int, blocks: int) -> None:
        self._heads, self._blocks, self._head_bits = heads, blocks, (heads - 1).bit_length()
        values = data.ArrayLayout(signed(SCORE_BITS), _LANES)
        super().__init__(
            {
                "i_buffer": In(BUFFER_WRITE),
                "i": In(data.StructLayout({"valid": 1, "op": Op})),
                "address": Out(12),
                "product": In(PRODUCT).array(2),
                "exceeds": In(heads * _LANES),
                "words": In(PV_BITS).array(_LANES),
                "i_tail": In(tail_scores(heads)),
                "o_factor": Out(factor_write(heads)),
                "o_fault": Out(1),
                "o": Out(data.StructLayout({"valid": 1, "values": values})),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Cycle 0: address. Cycle 1: products; tail. Cycle 2: words, bias. Cycle 3: scores."""
        m = Module()
        op = self.i.op
        buffer = self._buffer(m, op.entry, op.turn)
        is_read = wire(m, self.i.valid & (op.kind == OpKind.SCORES))
        # A read names its buffer; a row's is looked up by its entry and turn.
        m.d.comb += self.address.eq(Mux(is_read, op.address, Cat(op.address[:_BUFFER_BITS], buffer)))
        fault = self._biases(m, register(m, self.i), register(m, buffer))
        m.d.comb += self.o_fault.eq(delay(m, self._row_fault(m), self.FAULT_LATENCY - 2) | fault)
        self._read(m, is_read)
        return m

    def _buffer(self, m: Module, entry: Value, turn: Value) -> Value:
        m.submodules.buffers = buffers = Memory(shape=4, depth=self._blocks * _GROUP_MAX, init=[])
        write, read = buffers.write_port(), buffers.read_port(domain="comb")
        m.d.comb += [
            write.addr.eq(Cat(self.i_buffer.turn, self.i_buffer.entry)),
            write.data.eq(self.i_buffer.buffer),
            write.en.eq(self.i_buffer.valid),
            read.addr.eq(Cat(turn, entry)),
        ]
        return read.data

    def _tail(self, m: Module, moves: Value) -> list[Value]:
        """The last four scores of the tail that were read, in cycle 2."""
        tail, op = self.i_tail, self.i.op
        turn_bits = (_GROUP_MAX // self._heads - 1).bit_length()
        m.submodules.tail = memory = Memory(
            shape=self._heads * SCORE_BITS, depth=_TAIL_TOKENS << turn_bits, init=[], attrs={"ram_style": "block"}
        )
        write, read = memory.write_port(), memory.read_port()
        row, turn, group = op.address[:4], op.address[4 : 4 + turn_bits], op.address[7]
        m.d.comb += [
            read.addr.eq(Cat(op.token[:2], row, turn, group)),
            write.addr.eq(Cat(tail.token, tail.turn[:turn_bits], tail.entry[0])),
            write.data.eq(tail.scores),
            write.en.eq(tail.valid),
        ]
        scores = [read.data.word_select(head, SCORE_BITS) for head in range(self._heads)]
        newest = choose(scores, register(m, op.token[2:]))
        row_scores = [Signal(SCORE_BITS, name=f"tail_{k}", reset_less=True) for k in range(_LANES)]
        with m.If(moves):
            # Four reads of one token each: the last of them completes the row (`complete`).
            for one, following in zip(row_scores, [*row_scores[1:], newest], strict=True):
                m.d.sync += one.eq(following)
        return row_scores

    def _row_fault(self, m: Module) -> Value:
        """The range rule of fp16 rows, in cycle 2."""
        op = self.i.op
        heads = register(m, op.heads)
        valid = register(m, self.i.valid & (op.kind == OpKind.ROW) & (op.form == IndexFormat.FP16))
        # Lanes of heads that the group does not have multiply whatever is there.
        flags = [self.exceeds[k] & heads[k // _LANES] for k in range(len(self.exceeds))]
        return register(m, Cat(flags)).any() & register(m, valid)

    def _biases(self, m: Module, i: Any, buffer: Value) -> Value:
        """Factors of a row, head by head: w to the lanes, b to the head's bias of the block. Returns the fault."""
        op, end = i.op, Factor.LATENCY
        is_aux, quantised = i.valid & (op.kind == OpKind.AUX), op.form != IndexFormat.FP16
        m.submodules.factor = factor = Factor()
        m.d.comb += [
            factor.scale.eq(self.product[0]),
            factor.zero.eq(self.product[1]),
            factor.int4.eq(op.form == IndexFormat.INT4),
            factor.limit_shift.eq(op.limit_shift),
        ]
        aux, row_begins = delay(m, is_aux, end), delay(m, is_aux & op.first, end + 1)
        counts, int4 = delay(m, quantised, end), delay(m, op.form == IndexFormat.INT4, end)
        head, place = op.half[: self._head_bits], Cat(op.half[: self._head_bits], buffer)
        m.d.comb += [
            self.o_factor.valid.eq(aux & counts),
            self.o_factor.turn.eq(delay(m, op.turn, end)),
            self.o_factor.head.eq(delay(m, head, end)),
            self.o_factor.value.eq(factor.w),
        ]
        offset = Mux(int4, factor.w << (PAIR_SHIFT + 3), 0)
        biases = [register(m, Mux(counts, one[:SCORE_BITS], 0)) for one in (factor.b, factor.b + offset)]

        layout = data.ArrayLayout(SCORE_BITS, 2)
        m.submodules.biases = memory = Memory(shape=layout, depth=self._blocks << self._head_bits, init=[])
        write, read = memory.write_port(), memory.read_port(domain="comb")
        self._drained = memory.read_port(domain="comb")
        fresh, address = delay(m, op.fresh, end + 1), delay(m, place, end + 1)
        m.d.comb += [
            read.addr.eq(address),
            write.addr.eq(address),
            write.en.eq(row_begins),
            # A fresh block starts from 0: its memory still has the bias of the block before it.
            *(write.data[k].eq(bias + Mux(fresh, 0, read.data[k])) for k, bias in enumerate(biases)),
        ]
        # The factor of a head that does not exist may be outside, and is no fault.
        exists = delay(m, op.heads.bit_select(head, 1), end)
        return wire(m, aux & counts & factor.outside & exists)

    def _read(self, m: Module, is_read: Value) -> None:
        """A head's four scores, with their bias; tails have none."""
        op = self.i.op
        tail, element, buffer = (register(m, v) for v in (op.address[-1], op.token, op.address[_BUFFER_BITS:-1]))
        is_read = register(m, is_read)
        row_scores = self._tail(m, wire(m, is_read & tail))
        m.d.comb += self._drained.addr.eq(Cat(element[2 : 2 + self._head_bits], buffer))
        bias = Value.cast(Mux(element[0], self._drained.data[1], self._drained.data[0]))
        bias = register(m, Mux(tail, 0, bias))
        complete = register(m, is_read & (~tail | element[:2].all()))
        tail, upper = register(m, tail), register(m, element[0])
        m.d.comb += self.o.valid.eq(register(m, complete))
        for k, (word, of_tail) in enumerate(zip(self.words, row_scores, strict=True)):
            score = Mux(tail, of_tail, Mux(upper, word[SCORE_BITS : 2 * SCORE_BITS], word[:SCORE_BITS]))
            m.d.comb += self.o["values"][k].eq(register(m, (bias + score)[:SCORE_BITS]).as_signed())
