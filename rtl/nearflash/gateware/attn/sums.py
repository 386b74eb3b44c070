"""Sums of p·V: for each slot, head and channel an exact sum in block RAM, read, added to and written back.

    address ─► memory ─► + product ─► memory
                     └─► one sum -> o

Timing: `product` comes a cycle after its `i`; a sum is written WRITE_LATENCY cycles after its `i`, and may be read
again a cycle later; `o` shows the sum of the `i` of READ_LATENCY cycles ago. Free-running, one row a cycle.
Numerics: exact, units of 2^EXACT_LSB.
"""

from amaranth import Module, Mux
from amaranth.hdl import Shape, signed
from amaranth.lib import data, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.abi.attend.numbers import PV_BITS
from nearflash.gateware.attn.choice import choose
from nearflash.gateware.fp.pipeline import delay, register
from nearflash.gateware.num.add import ExactAdd
from nearflash.gateware.num.product import PRODUCT

__all__ = ["SumMemory"]

_LANES = 4


class SumMemory(wiring.Component):
    """`rows` rows of four sums for each of G heads.

    Parameters: heads (G), rows.
    Members
    -------
    i : In, {address, fresh, add, element}: a row; `fresh`: take its sums as zero; `add`: add the products, write back.
    product : In, PRODUCT, array of G·4, a cycle after `i`.
    o : Out, the sum of number `i.element` in its row (lane + 4·head).
    """

    #: Cycles from `i` to the write.
    WRITE_LATENCY = 1 + ExactAdd.LATENCY
    #: Cycles from `i` to `o`.
    READ_LATENCY = 2

    def __init__(self, heads: int, rows: int) -> None:
        self._count, self._rows = heads * _LANES, rows
        super().__init__(
            {
                "i": In(data.StructLayout({"address": 12, "fresh": 1, "add": 1, "element": range(self._count)})),
                "product": In(PRODUCT).array(self._count),
                "o": Out(signed(PV_BITS)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """One memory of wide rows."""
        m = Module()
        shape = data.ArrayLayout(signed(PV_BITS), self._count)
        m.submodules.memory = memory = Memory(shape=Shape.cast(shape).width, depth=self._rows, init=[])
        write, read = memory.write_port(), memory.read_port(domain="comb")
        m.d.comb += [
            read.addr.eq(self.i.address),
            write.addr.eq(delay(m, self.i.address, self.WRITE_LATENCY)),
            write.en.eq(delay(m, self.i.add, self.WRITE_LATENCY)),
        ]
        # Read registers that are cleared: those of the block RAM.
        row = register(m, Mux(self.i.fresh, 0, read.data))
        element = register(m, self.i.element)
        words = [row.word_select(k, PV_BITS) for k in range(self._count)]
        for k, word in enumerate(words):
            m.submodules[f"add_{k}"] = add = ExactAdd()
            m.d.comb += [
                add.i.eq(word),
                add.product.eq(self.product[k]),
                write.data.word_select(k, PV_BITS).eq(add.o),
            ]
        m.d.comb += self.o.eq(register(m, choose(words, element)).as_signed())
        return m
