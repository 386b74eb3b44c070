"""Score memory: approximate scores of the blocks and tail groups under way, eight tokens a word, in block RAM.

    products ─► score of each token ─► + word of the block, or word itself if `fresh` ─► memory ─► o
    tail's scores ──────────────────────────────────────────────────────────────────────┘
    factors b ─► bias of the block and head, added on the way out

Buffers hold 128 words for one set of heads; the last one holds tail groups, 64 words each. int4's high tokens were
multiplied with code - 8, so they have a bias of their own.

Timing: a word is written WRITE_LATENCY cycles after its products; a word that was read is on `o` READ_LATENCY cycles
after its operation would have had its products. The caller keeps tails and rows apart. Free-running.
Numerics: integers, least bit 2^-16, exact.
"""

from typing import Any

from amaranth import Array, Cat, Module, Mux, Signal
from amaranth.hdl import C, Value, signed
from amaranth.lib import data, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.abi.attend.numbers import EXACT_LSB, SCORE_BITS, SCORE_LSB
from nearflash.abi.attend.pages import IndexFormat
from nearflash.gateware.attn.beats import Op, OpKind
from nearflash.gateware.attn.blocks import BUFFER_WRITE
from nearflash.gateware.attn.dots import tail_scores
from nearflash.gateware.attn.factors import Factor
from nearflash.gateware.attn.lanes import factor_write
from nearflash.gateware.fp.pipeline import delay, register, wire
from nearflash.gateware.num.carry import carry_add
from nearflash.gateware.num.product import PRODUCT, Product, magnitude_exceeds

__all__ = ["BUFFER_WORDS", "TAIL_WORDS", "ScoreMemory"]

_LANES = 4
_TOKENS = 8
_GROUP_MAX = 8
BUFFER_WORDS = 128
TAIL_WORDS = 64
_LOW_BITS = 21  # of the lower of two int4 products
_INT4_SHIFT, _INT8_SHIFT = 6, 2  # from their least bits to 2^SCORE_LSB


class ScoreMemory(wiring.Component):
    """Scores of `blocks` buffers and the tail.

    Parameters: heads (G), blocks.
    Members
    -------
    i_buffer : In, BUFFER_WRITE.
    i : In, {valid, op} with `product`, PRODUCT, array of G·4, and `borrow`, as Lanes gives them.
    i_tail : In, tail_scores: written at once.
    o_factor : Out, factor_write.
    o_fault : Out, the operation of FAULT_LATENCY cycles ago broke the range rule.
    o : Out, the four scores of one head that a SCORES operation asked for: element = 2·head + half.
    """

    #: Cycles from products to the fault, whichever kind of operation it was.
    FAULT_LATENCY = Factor.LATENCY
    WRITE_LATENCY = 2
    READ_LATENCY = 3

    def __init__(self, heads: int, blocks: int) -> None:
        self._heads, self._blocks = heads, blocks
        super().__init__(
            {
                "i_buffer": In(BUFFER_WRITE),
                "i": In(data.StructLayout({"valid": 1, "op": Op})),
                "product": In(PRODUCT).array(heads * _LANES),
                "borrow": In(heads * _LANES),
                "i_tail": In(tail_scores(heads)),
                "o_factor": Out(factor_write(heads)),
                "o_fault": Out(1),
                "o": Out(data.ArrayLayout(signed(SCORE_BITS), _LANES)),
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
        self._write_tail(m, write)
        row_fault = self._row_fault(m, is_row)
        factor_fault = self._biases(m, buffer)
        m.d.comb += self.o_fault.eq(delay(m, row_fault, self.FAULT_LATENCY - 1) | factor_fault)
        self._read(m, word)
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
        """Words by head and token, a cycle after the address; the write port."""
        count = self._heads * _TOKENS
        depth = (self._blocks + 1) * BUFFER_WORDS
        m.submodules.memory = memory = Memory(shape=count * SCORE_BITS, depth=depth, init=[])
        write, read = memory.write_port(granularity=SCORE_BITS), memory.read_port()
        m.d.comb += read.addr.eq(address)
        scores = [read.data.word_select(k, SCORE_BITS).as_signed() for k in range(count)]
        return [scores[head * _TOKENS : head * _TOKENS + _TOKENS] for head in range(self._heads)], write

    def _terms(self, m: Module, head: int) -> list[tuple[Value, Value]]:
        """Score of each token of the word, and a carry to add; registered."""
        form, drop = self.i.op.form, SCORE_LSB - EXACT_LSB
        int4, fp16 = wire(m, form == IndexFormat.INT4), wire(m, form == IndexFormat.FP16)
        low, high = [], []
        for j in range(_LANES):
            product, borrow = self.product[head * _LANES + j], self.borrow[head * _LANES + j]
            integer = product.bits[Product.INTEGER_PLACE :]
            whole = Cat(C(0, _INT8_SHIFT), integer)[:SCORE_BITS]
            below = Cat(C(0, _INT4_SHIFT), integer[:_LOW_BITS], borrow.replicate(SCORE_BITS))[:SCORE_BITS]
            above = Cat(borrow.replicate(_INT4_SHIFT), integer[_LOW_BITS : 2 * _LOW_BITS + 1].as_signed())
            cut = product.bits[drop : drop + SCORE_BITS]
            one = wire(m, Mux(fp16, cut, Mux(int4, below, whole)))
            sign = integer[2 * _LOW_BITS]
            other = Mux(int4, Cat(above, sign.replicate(SCORE_BITS))[:SCORE_BITS], one)
            low.append((register(m, one), register(m, fp16 & product.negative)))
            high.append((register(m, other), register(m, Mux(fp16, product.negative, int4 & borrow))))
        return low + high

    def _write_rows(self, m: Module, valid: Value, word: list[list[Value]], write: Any, address: Value) -> None:
        """A word of scores, two cycles after its products."""
        fresh, op = register(m, self.i.op.fresh), self.i.op
        sums = []
        for head in range(self._heads):
            for token, (term, carry) in enumerate(self._terms(m, head)):
                before = Mux(fresh, 0, word[head][token])
                sums.append(register(m, carry_add(m, term, before.as_unsigned(), carry)[:SCORE_BITS]))
        int4 = op.form == IndexFormat.INT4
        halves = wire(m, Cat((int4 | (op.half == half)) & valid for half in (0, 1)))
        enable = delay(m, Cat(halves[0].replicate(_LANES), halves[1].replicate(_LANES)), 2)
        m.d.comb += [
            write.addr.eq(address),
            write.data.eq(Cat(sums)),
            write.en.eq(Cat(enable for _ in range(self._heads))),
        ]

    def _write_tail(self, m: Module, write: Any) -> None:
        tail = self.i_tail
        place = wire(m, Cat(tail.token[3:], tail.turn, tail.entry[0]))
        with m.If(tail.valid):
            m.d.comb += [
                write.addr.eq(self._blocks * BUFFER_WORDS + place),
                write.data.eq(Cat(tail.scores[head] for head in range(self._heads) for _ in range(_TOKENS))),
                write.en.eq(Cat((tail.token[:3] == k) for _ in range(self._heads) for k in range(_TOKENS))),
            ]

    def _row_fault(self, m: Module, is_row: Value) -> Value:
        """The range rule of fp16 rows."""
        op, flags = self.i.op, []
        for k, product in enumerate(self.product):
            flags.append(magnitude_exceeds(m, product, op.limit_shift) & op.heads[k // _LANES])
        valid = register(m, is_row & (op.form == IndexFormat.FP16))
        return register(m, Cat(flags)).any() & valid

    def _biases(self, m: Module, buffer: Value) -> Value:
        """Factors of a row: w to the lanes, b to the block's bias. Returns the fault."""
        op, layout = self.i.op, data.ArrayLayout(data.ArrayLayout(signed(SCORE_BITS), 2), self._heads)
        m.submodules.biases = memory = Memory(shape=layout, depth=self._blocks, init=[])
        write, read = memory.write_port(), memory.read_port(domain="comb")
        self._drained = memory.read_port(domain="comb")
        end = Factor.LATENCY
        quantised = wire(m, op.form != IndexFormat.FP16)
        is_aux = wire(m, self.i.valid & (op.kind == OpKind.AUX))
        aux, row_begins, fresh = delay(m, is_aux, end), delay(m, is_aux & op.first, end), delay(m, op.fresh, end)
        counts, int4 = delay(m, quantised, end), delay(m, op.form == IndexFormat.INT4, end)
        address, exists = delay(m, buffer, end), delay(m, op.heads, end)
        outside = []
        m.d.comb += [read.addr.eq(address), write.addr.eq(address), write.en.eq(row_begins)]
        for head in range(self._heads):
            m.submodules[f"factor_{head}"] = factor = Factor()
            m.d.comb += [
                factor.scale.eq(self.product[head * _LANES]),
                factor.zero.eq(self.product[head * _LANES + 1]),
                factor.int4.eq(op.form == IndexFormat.INT4),
                factor.limit_shift.eq(op.limit_shift),
                self.o_factor.values[head].eq(factor.w),
            ]
            b = Mux(counts, factor.b, 0)
            offset = Mux(int4, factor.w << (_INT4_SHIFT + 3), 0)
            for half, bias in enumerate((b, b + offset)):
                before = Mux(fresh, 0, read.data[head][half])
                m.d.comb += write.data[head][half].eq(before + bias)
            outside.append(factor.outside & exists[head])
        m.d.comb += [self.o_factor.valid.eq(aux & counts), self.o_factor.turn.eq(delay(m, op.turn, end))]
        return wire(m, aux & counts & Cat(outside).any())

    def _read(self, m: Module, word: list[list[Value]]) -> None:
        """One head's four scores, with their bias; tails have none."""
        op = self.i.op
        element, buffer = register(m, op.token), register(m, op.address[7:])
        options = Array(
            Cat(word[head][half * _LANES : half * _LANES + _LANES]) for head in range(self._heads) for half in (0, 1)
        )
        scores = register(m, options[element])
        late = register(m, element)
        m.d.comb += self._drained.addr.eq(register(m, buffer))
        is_tail = delay(m, buffer == self._blocks, 1)
        bias = Array(self._drained.data[k][half] for k in range(self._heads) for half in (0, 1))[late]
        bias = wire(m, Mux(is_tail, 0, Value.cast(bias)).as_signed())
        for k in range(_LANES):
            total = Signal(signed(SCORE_BITS), name=f"score_{k}", reset_less=True)
            m.d.sync += total.eq(scores.word_select(k, SCORE_BITS).as_signed() + bias)
            m.d.comb += self.o[k].eq(total)
