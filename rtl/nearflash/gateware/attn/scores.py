"""Score memory: approximate scores of the blocks and tail groups under way, eight tokens a word, in block RAM.

    products ─► score of each token ─► + word of the block, or word itself if `fresh` ─► memory ─┬─► o
    tail's scores ───────────────────────────────────────────────────────────────► tail memory ─┤
    factors b ─► bias of the block and head ────────────────────────────────────────────────────┘

Buffers hold 128 words for one set of heads. The address of the buffer behind the last one is that of the tail: two
token groups, 64 words each. int4's high tokens were multiplied with code - 8, so they have a bias of their own.

Timing: a word is written WRITE_LATENCY cycles after its products; a word that was read is on `o` READ_LATENCY cycles
after its operation would have had its products. Free-running.
Numerics: integers, least bit 2^-16, exact.
"""

from typing import Any

from amaranth import Cat, Module, Mux, Signal
from amaranth.hdl import C, Value, signed
from amaranth.lib import data, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.abi.attend.numbers import EXACT_LSB, SCORE_BITS, SCORE_LSB
from nearflash.abi.attend.pages import IndexFormat
from nearflash.gateware.attn.beats import Op, OpKind
from nearflash.gateware.attn.blocks import BUFFER_WRITE
from nearflash.gateware.attn.choice import choose
from nearflash.gateware.attn.dots import tail_scores
from nearflash.gateware.attn.factors import Factor
from nearflash.gateware.attn.lanes import factor_write
from nearflash.gateware.fp.pipeline import delay, register, wire
from nearflash.gateware.num.carry import carry_add
from nearflash.gateware.num.product import PRODUCT, Product

__all__ = ["BUFFER_WORDS", "ScoreMemory"]

_LANES = 4
_TOKENS = 8
_GROUP_MAX = 8
BUFFER_WORDS = 128
_DISTRIBUTED_ROWS = 64  # a memory so shallow and wide goes into LUTs: it would take a block RAM for every 72 bits
_LOW_BITS = 21  # of the lower of two int4 products
_INT4_SHIFT = 6  # from their least bit to 2^SCORE_LSB


class ScoreMemory(wiring.Component):
    """Scores of `blocks` buffers and the tail.

    Parameters: heads (G), blocks.
    Members
    -------
    i_buffer : In, BUFFER_WRITE.
    i : In, {valid, op} with `product`, PRODUCT, array of G·4, `exceeds` and `borrow`, as Lanes gives them.
    i_tail : In, tail_scores: written at once.
    o_factor : Out, factor_write.
    o_fault : Out, the operation of FAULT_LATENCY cycles ago broke the range rule.
    o : Out, {values}, the four scores of one head that a SCORES operation asked for: element = 2·head + half.
    """

    #: Cycles from products to the fault, whichever kind of operation it was.
    FAULT_LATENCY = Factor.LATENCY
    WRITE_LATENCY = 2
    READ_LATENCY = 3

    def __init__(self, heads: int, blocks: int) -> None:
        self._heads, self._blocks, self._head_bits = heads, blocks, (heads - 1).bit_length()
        super().__init__(
            {
                "i_buffer": In(BUFFER_WRITE),
                "i": In(data.StructLayout({"valid": 1, "op": Op})),
                "product": In(PRODUCT).array(heads * _LANES),
                "exceeds": In(heads * _LANES),
                "borrow": In(heads * _LANES),
                "i_tail": In(tail_scores(heads)),
                "o_factor": Out(factor_write(heads)),
                "o_fault": Out(1),
                "o": Out(data.StructLayout({"values": data.ArrayLayout(signed(SCORE_BITS), _LANES)})),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Cycle 0: products, address. Cycle 1: the word. Cycle 2: sum; what is read, chosen. Cycle 3: bias."""
        m = Module()
        op = self.i.op
        buffer = self._buffer(m, op.entry, op.turn)
        is_row, is_read = (wire(m, self.i.valid & (op.kind == kind)) for kind in (OpKind.ROW, OpKind.SCORES))
        read_address = Mux(is_read, op.address, Cat(op.address[:7], buffer))
        word, write = self._memory(m, read_address)
        self._write_rows(m, wire(m, is_row), word, write, delay(m, Value.cast(read_address), 2))
        tail = self._tail(m)
        row_fault = self._row_fault(m, is_row)
        factor_fault = self._biases(m, buffer)
        m.d.comb += self.o_fault.eq(delay(m, row_fault, self.FAULT_LATENCY - 1) | factor_fault)
        self._read(m, word, tail)
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

    def _memory(self, m: Module, address: Value) -> tuple[list[list[Value]], Any]:
        """Words by head and token, a cycle after the address, zero for a fresh block; the write port."""
        count = self._heads * _TOKENS
        depth = self._blocks * BUFFER_WORDS
        m.submodules.memory = memory = Memory(shape=count * SCORE_BITS, depth=depth, init=[])
        write, read = memory.write_port(granularity=SCORE_BITS), memory.read_port(domain="comb")
        m.d.comb += read.addr.eq(address)
        row = register(m, Mux(self.i.op.fresh, 0, read.data))  # a register that is cleared: the block RAM's own
        scores = [row.word_select(k, SCORE_BITS) for k in range(count)]
        return [scores[head * _TOKENS : head * _TOKENS + _TOKENS] for head in range(self._heads)], write

    def _terms(self, m: Module, head: int) -> list[tuple[Value, Value]]:
        """Score of each token of the word, and a carry to add; a cycle after the products.

        All but int4 lie where cut products do. The choice is left to the adder's LUTs.
        """
        int4, drop = register(m, self.i.op.form == IndexFormat.INT4), SCORE_LSB - EXACT_LSB
        low, high = [], []
        for j in range(_LANES):
            product, borrow = self.product[head * _LANES + j], self.borrow[head * _LANES + j]
            bits = register(m, product.bits[: drop + SCORE_BITS])
            borrowed, negative = register(m, borrow), register(m, product.negative)
            integer = bits[Product.INTEGER_PLACE :]
            below = Cat(C(0, _INT4_SHIFT), integer[:_LOW_BITS], borrowed.replicate(SCORE_BITS))
            above = integer[_LOW_BITS : 2 * _LOW_BITS]
            above = Cat(borrowed.replicate(_INT4_SHIFT), above, integer[2 * _LOW_BITS].replicate(SCORE_BITS))
            one = bits[drop:]
            low.append((Mux(int4, below[:SCORE_BITS], one), negative))
            high.append((Mux(int4, above[:SCORE_BITS], one), negative | borrowed))
        return low + high

    def _write_rows(self, m: Module, valid: Value, word: list[list[Value]], write: Any, address: Value) -> None:
        """A word of scores, two cycles after its products."""
        op, sums = self.i.op, []
        for head in range(self._heads):
            for token, (term, carry) in enumerate(self._terms(m, head)):
                sums.append(register(m, carry_add(m, word[head][token], term, carry)[:SCORE_BITS]))
        int4 = op.form == IndexFormat.INT4
        halves = wire(m, Cat((int4 | (op.half[0] == half)) & valid for half in (0, 1)))
        enable = delay(m, Cat(halves[0].replicate(_LANES), halves[1].replicate(_LANES)), 2)
        m.d.comb += [
            write.addr.eq(address),
            write.data.eq(Cat(sums)),
            write.en.eq(Cat(enable for _ in range(self._heads))),
        ]

    def _tail(self, m: Module) -> list[Value]:
        """By head, four scores of the tail, a cycle after the address; a memory for each of the four.

        Rows of four tokens: 16 a group, as many turns as sets of heads, 2 groups.
        """
        tail, op = self.i_tail, self.i.op
        turn_bits = (_GROUP_MAX // self._heads - 1).bit_length()
        depth = 2 * 16 << turn_bits
        style = {"ram_style": "distributed"} if depth <= _DISTRIBUTED_ROWS else {}
        rows = []
        for k in range(_LANES):
            shape = self._heads * SCORE_BITS
            m.submodules[f"tail_{k}"] = memory = Memory(shape=shape, depth=depth, init=[], attrs=style)
            write, read = memory.write_port(), memory.read_port()
            m.d.comb += [
                read.addr.eq(Cat(op.token[0], op.address[: 3 + turn_bits], op.address[6])),
                write.addr.eq(Cat(tail.token[2:], tail.turn[:turn_bits], tail.entry[0])),
                write.data.eq(tail.scores),
                write.en.eq(tail.valid & (tail.token[:2] == k)),
            ]
            rows.append(read.data)
        return [Cat(row.word_select(head, SCORE_BITS) for row in rows) for head in range(self._heads)]

    def _row_fault(self, m: Module, is_row: Value) -> Value:
        """The range rule of fp16 rows."""
        op = self.i.op
        flags = [self.exceeds[k] & op.heads[k // _LANES] for k in range(len(self.exceeds))]
        valid = register(m, is_row & (op.form == IndexFormat.FP16))
        return register(m, Cat(flags)).any() & valid

    def _biases(self, m: Module, buffer: Value) -> Value:
        """Factors of a row, head by head: w to the lanes, b to the head's bias of the block. Returns the fault."""
        op, end = self.i.op, Factor.LATENCY
        is_aux, quantised = self.i.valid & (op.kind == OpKind.AUX), op.form != IndexFormat.FP16
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
        offset = Mux(int4, factor.w << (_INT4_SHIFT + 3), 0)
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
            *(write.data[k].eq(bias + Mux(fresh, 0, read.data[k])) for k, bias in enumerate(biases)),
        ]
        exists = delay(m, op.heads.bit_select(head, 1), end)
        return wire(m, aux & counts & factor.outside & exists)

    def _read(self, m: Module, word: list[list[Value]], tail: list[Value]) -> None:
        """One head's four scores, with their bias; tails have none."""
        op = self.i.op
        element, buffer = register(m, op.token), register(m, op.address[7:])
        options = [
            Cat(word[head][half * _LANES : half * _LANES + _LANES]) for head in range(self._heads) for half in (0, 1)
        ]
        is_tail = wire(m, buffer == self._blocks)
        scores = register(m, Mux(is_tail, choose(tail, element[1:]), choose(options, element)))
        m.d.comb += self._drained.addr.eq(Cat(element[1 : 1 + self._head_bits], buffer))
        bias = Value.cast(Mux(element[0], self._drained.data[1], self._drained.data[0]))
        bias = register(m, Mux(is_tail, 0, bias))
        for k in range(_LANES):
            total = Signal(signed(SCORE_BITS), name=f"score_{k}", reset_less=True)
            m.d.sync += total.eq(scores.word_select(k, SCORE_BITS) + bias)
            m.d.comb += self.o.values[k].eq(total)
