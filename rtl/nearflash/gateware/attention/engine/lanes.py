"""Lanes: 4·G exact multipliers, and the memories that their second operands come from.

    data ──────────────────────────► special? channel selected? ─► a ─┐
    query ─► query memory ─► row, or one channel for all lanes ─► b ──┴─► Product ─► o
    weight ─► weight memory ─► p of the token, for all lanes ─► b
    data ─► codes of tokens j (low) and, int4, j + 4 (high) ─► code; factor ─► w of the row ─► factor

Timing: products LATENCY cycles after the operation, one a cycle, free-running.
Numerics: exact; an element of `data` that is an infinity or a NaN counts 0.
"""

from typing import Any

from amaranth import Cat, Module, Mux, Signal
from amaranth.hdl import C, Value, signed
from amaranth.lib import data, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.pages import IndexFormat
from nearflash.gateware.attention.engine.beats import Op, OpKind
from nearflash.gateware.attention.engine.interfaces import query_write
from nearflash.gateware.attention.engine.multiplexer import choose
from nearflash.gateware.attention.numerics.product import (
    MULTIPLICAND,
    MULTIPLIER,
    OPERAND,
    PRODUCT,
    ExactProduct,
    fp16_operand,
    magnitude_exceeds,
)
from nearflash.gateware.fp.pipeline import delay, register, wire
from nearflash.gateware.stream.datapath import Datapath, Timed

__all__ = ["FACTOR_BITS", "Lanes", "factor_write", "weight_write"]

_LANES = 4
_GROUP_MAX = 8
FACTOR_BITS = 18
_AUX_LANES = ((0, 0), (0, 1))  # scale and zero
_PLACES_A, _PLACES_B = zip(ExactProduct.INTEGER_PLACES, ExactProduct.SHORT_PLACES, strict=True)
_OPERANDS = ("kind", "data", "lane", "tail", "form", "half")


def weight_write(heads: int) -> data.StructLayout:
    """Weights of one token for one set of heads, as multipliers take them."""
    return data.StructLayout({"valid": 1, "address": 10, "values": data.ArrayLayout(OPERAND, heads)})


def factor_write(heads: int) -> data.StructLayout:
    """Factor w of an index row for one head of a set."""
    return data.StructLayout({"valid": 1, "turn": 3, "head": range(max(2, heads)), "value": signed(FACTOR_BITS)})


class Lanes(wiring.Component):
    """Four lanes for each of G heads.

    Parameters: heads (G), query_rows, weights (places of the weight memory).
    Members
    -------
    i_query : In, {valid, row}: broadcast. i_weight : In, weight_write.
    i_factor : In, factor_write: w of an int8 or int4 row.
    op : In, Op of each cycle; kinds that need no lanes may come and give something.
    o : Out, PRODUCT, array of G·4, head by head, of the `op` of LATENCY cycles ago. For int4 two products, w·code of
    token j in the lower 21 bits and w·(code - 8) of token j + 4 above them. For an aux beat the first two products are
    those of head `half` of the set, the others mean nothing.
    exceeds : Out, a bit for each of `o`: breaks the range rule. Combinational.
    borrow : Out, a bit for each of `o`: the lower of the two products is negative.
    nonfinite : Out, an element that counts was an infinity or a NaN; of the `op` of NONFINITE_LATENCY cycles ago.
    """

    #: Cycles from `op` to `o`.
    LATENCY = 3 + ExactProduct.LATENCY
    #: Cycles from `op` to `nonfinite`.
    NONFINITE_LATENCY = 3

    def __init__(self, heads: int, query_rows: int, weights: int) -> None:
        self._heads, self._query_rows, self._weights = heads, query_rows, weights
        super().__init__(
            {
                "i_query": In(data.StructLayout({"valid": 1, "row": query_write(heads)})),
                "i_weight": In(weight_write(heads)),
                "i_factor": In(factor_write(heads)),
                "op": In(Op),
                "o": Out(PRODUCT).array(heads * _LANES),
                "exceeds": Out(heads * _LANES),
                "borrow": Out(heads * _LANES),
                "nonfinite": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Cycles 0 and 1: memories. Cycle 2: operands. From cycle 3: multiply."""
        m = Module()
        path = Datapath(m)
        op = {name: path.delay(Timed(self.op[name], 0), 2) for name in _OPERANDS}
        queries, selected = self._queries(m)
        weights = self._read_weights(m)
        key, value = wire(m, op["kind"] == OpKind.KEY), wire(m, op["kind"] == OpKind.VALUE)

        early = path.delay(Timed(self.op.data, 0), 1)
        special = register(m, Cat(early[16 * j + 10 : 16 * j + 15].all() for j in range(_LANES)))
        row, aux = wire(m, op["kind"] == OpKind.ROW), wire(m, op["kind"] == OpKind.AUX)
        fp16 = wire(m, op["form"] == IndexFormat.FP16)
        counted = wire(m, ~(op["tail"] & key).replicate(_LANES) | selected)
        checked = wire(m, Mux(aux, Mux(fp16, 0, 0b0011), Mux(key | value | (row & fp16), counted, 0)))
        m.d.comb += self.nonfinite.eq(register(m, (special & checked).any()))
        kept = wire(m, counted & ~special)
        integer, int4 = wire(m, row & ~fp16), wire(m, op["form"] == IndexFormat.INT4)
        codes, factors = self._codes(m, op), self._factors(m)
        a = [self._element(m, op["data"].word_select(j, 16), kept[j], integer, int4, codes[j]) for j in range(_LANES)]
        # What all lanes of a head multiply with, but for K.
        shared = []
        for head in range(self._heads):
            element = choose([queries[head][j] for j in range(_LANES)], op["lane"])
            number = data.View(OPERAND, wire(m, Mux(value, Value.cast(weights[head]), element)))
            shared.append(
                register(m, self._either(m, MULTIPLIER, number, integer, factors[head], Mux(int4, *_PLACES_B)))
            )
        keys = [[register(m, queries[head][j]) for j in range(_LANES)] for head in range(self._heads)]
        aux_head = register(m, Mux(aux, op["half"], 0))
        of_aux = data.View(MULTIPLIER, wire(m, choose(shared, aux_head)))
        truncate, key = register(m, (op["tail"] & key) | (row & fp16)), register(m, key)
        limit_shift, exceeds = path.delay(Timed(self.op.limit_shift, 0), self.LATENCY), []
        for head in range(self._heads):
            for j in range(_LANES):
                m.submodules[f"product_{head}_{j}"] = product = ExactProduct()
                k, number = head * _LANES + j, keys[head][j]
                other = of_aux if (head, j) in _AUX_LANES else shared[head]
                m.d.comb += [product.b[name].eq(Mux(key, number[name], other[name])) for name, _ in OPERAND]
                m.d.comb += [product.a.eq(a[j]), product.truncate.eq(truncate), self.o[k].eq(product.o)]
                exceeds.append(magnitude_exceeds(m, product.o, limit_shift))
                borrow = register(m, int4 & factors[head][-1] & codes[j][:4].any())
                m.d.comb += self.borrow[k].eq(delay(m, borrow, ExactProduct.LATENCY))
        m.d.comb += self.exceeds.eq(Cat(exceeds))
        return m

    def _element(self, m: Module, bits: Value, kept: Value, integer: Value, int4: Value, code: Value) -> Any:
        """Choose what a lane multiplies, in cycle 3: an element, or the code of one."""
        number = fp16_operand(m, register(m, Mux(kept, bits, 0)))
        integer, int4, code = register(m, integer), register(m, int4), register(m, code)
        return self._either(m, MULTIPLICAND, number, integer, code, Mux(int4, *_PLACES_A))

    def _either(self, m: Module, shape: Any, number: Any, is_integer: Value, integer: Value, places: Value) -> Any:
        """An operand of Product: a number, or an integer with its places."""
        o = Signal(shape)
        m.d.comb += [
            o.value.eq(Mux(is_integer, integer, number.value)),
            o.places.eq(Mux(is_integer, places, number.places)),
            o.negative.eq(~is_integer & number.negative),
        ]
        return o

    def _codes(self, m: Module, op: dict[str, Any]) -> list[Value]:
        """Choose what the lanes multiply w with: one byte, or one nibble low and one, less 8, high."""
        half = wire(m, Mux(op["half"][0], op["data"][32:], op["data"][:32]))
        int4 = wire(m, op["form"] == IndexFormat.INT4)
        nibbles = [half.word_select(k, 4) for k in range(8)]
        packed = [Cat(nibbles[j], C(0, 17), nibbles[j + 4] ^ 8) for j in range(_LANES)]
        return [wire(m, Mux(int4, packed[j], half.word_select(j, 8)).as_signed()) for j in range(_LANES)]

    def _factors(self, m: Module) -> data.View:
        """w of the turn that is in cycle 2."""
        layout = data.ArrayLayout(signed(FACTOR_BITS), self._heads)
        turns = _GROUP_MAX // self._heads
        m.submodules.factors = memory = Memory(shape=layout, depth=max(2, turns), init=[])
        write, read = memory.write_port(granularity=1), memory.read_port(domain="comb")
        m.d.comb += [
            write.addr.eq(self.i_factor.turn),
            *(write.data[head].eq(self.i_factor.value) for head in range(self._heads)),
            write.en.eq(Mux(self.i_factor.valid, 1 << self.i_factor.head, 0)),
            read.addr.eq(delay(m, self.op.turn, 2)),
        ]
        return read.data

    def _queries(self, m: Module) -> tuple[data.View, data.View]:
        layout = query_write(self._heads)
        word = data.StructLayout({name: layout[name].shape for name in ("values", "selected")})
        m.submodules.queries = memory = Memory(shape=word, depth=self._query_rows, init=[])
        write, read = memory.write_port(), memory.read_port()
        m.d.comb += [
            write.addr.eq(self.i_query.row.address),
            write.data.values.eq(self.i_query.row.values),
            write.data.selected.eq(self.i_query.row.selected),
            write.en.eq(self.i_query.valid),
            read.addr.eq(self.op.query),
        ]
        row = register(m, read.data)
        return row.values, row.selected

    def _read_weights(self, m: Module) -> data.View:
        layout = weight_write(self._heads)["values"].shape
        m.submodules.weights = memory = Memory(shape=layout, depth=self._weights, init=[])
        write, read = memory.write_port(), memory.read_port()
        m.d.comb += [
            write.addr.eq(self.i_weight.address),
            write.data.eq(self.i_weight.values),
            write.en.eq(self.i_weight.valid),
            read.addr.eq(self.op.weight),
        ]
        return register(m, read.data)
