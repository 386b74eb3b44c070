"""Lanes: 4·G exact multipliers, and the memories that their second operands come from.

    data ──────────────────────────► special? channel selected? ─► a ─┐
    query ─► query memory ─► row, or one channel for all lanes ─► b ──┴─► Product ─► o
    weight ─► weight memory ─► p of the token, for all lanes ─► b

Timing: products LATENCY cycles after the operation, one a cycle, free-running.
Numerics: exact; an element of `data` that is an infinity or a NaN counts 0.
"""

from amaranth import Array, Cat, Module, Mux
from amaranth.lib import data, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.gateware.attn.beats import Op, OpKind
from nearflash.gateware.attn.interfaces import query_write
from nearflash.gateware.datapath import Datapath, Timed
from nearflash.gateware.fp.pipeline import register, wire
from nearflash.gateware.num.product import PRODUCT, Product

__all__ = ["Lanes", "weight_write"]

_LANES = 4


def weight_write(heads: int) -> data.StructLayout:
    """Weights of one token for one set of heads."""
    return data.StructLayout({"valid": 1, "address": 10, "values": data.ArrayLayout(16, heads)})


class Lanes(wiring.Component):
    """Four lanes for each of G heads.

    Parameters: heads (G), query_rows, weights (places of the weight memory).
    Members
    -------
    i_query : In, {valid, row}: broadcast. i_weight : In, weight_write.
    op : In, Op of each cycle; kinds that need no lanes may come and give something.
    o : Out, PRODUCT, array of G·4, head by head, of the `op` of LATENCY cycles ago.
    nonfinite : Out, an element that counts was an infinity or a NaN; of the `op` of NONFINITE_LATENCY cycles ago.
    """

    #: Cycles from `op` to `o`.
    LATENCY = 3 + Product.LATENCY
    #: Cycles from `op` to `nonfinite`.
    NONFINITE_LATENCY = 3

    def __init__(self, heads: int, query_rows: int, weights: int) -> None:
        self._heads, self._query_rows, self._weights = heads, query_rows, weights
        super().__init__(
            {
                "i_query": In(data.StructLayout({"valid": 1, "row": query_write(heads)})),
                "i_weight": In(weight_write(heads)),
                "op": In(Op),
                "o": Out(PRODUCT).array(heads * _LANES),
                "nonfinite": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Cycles 0 and 1: memories. Cycle 2: operands. From cycle 3: multiply."""
        m = Module()
        path = Datapath(m)
        op = {name: path.delay(Timed(self.op[name], 0), 2) for name in ("kind", "data", "lane", "tail")}
        queries, selected = self._queries(m)
        weights = self._read_weights(m)
        key, value = wire(m, op["kind"] == OpKind.KEY), wire(m, op["kind"] == OpKind.VALUE)

        early = path.delay(Timed(self.op.data, 0), 1)
        special = register(m, Cat(early[16 * j + 10 : 16 * j + 15].all() for j in range(_LANES)))
        counted = wire(m, ~(op["tail"] & key).replicate(_LANES) | selected)
        m.d.comb += self.nonfinite.eq(register(m, (special & counted).any() & (key | value)))
        kept = wire(m, counted & ~special)
        a = [register(m, op["data"].word_select(j, 16) & kept[j].replicate(16)) for j in range(_LANES)]
        for head in range(self._heads):
            row = queries[head]
            shared = wire(m, Mux(value, weights[head], Array(row[j] for j in range(_LANES))[op["lane"]]))
            for j in range(_LANES):
                m.submodules[f"product_{head}_{j}"] = product = Product()
                b = register(m, Mux(key, row[j], shared))
                cut = path.delay(Timed(self.op.tail, 0), 3)
                m.d.comb += [product.a.eq(a[j]), product.b.eq(b), product.cut.eq(cut)]
                m.d.comb += self.o[head * _LANES + j].eq(product.o)
        return m

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
