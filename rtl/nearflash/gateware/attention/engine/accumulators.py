"""Accumulators: exact sums of p·V and scores of index rows in one block RAM, and one adder a lane for both.

    address ─► memory, a word a lane ─► + product ─► memory
                                     └─► words of one head -> o

A word is a sum, or two scores: that of token j of eight in its lower SCORE_BITS bits, that of token j + 4 above. Bits
of sums that no score needs have a memory of their own.

Timing: `product` and `borrow` come a cycle after their `i`; a word is written WRITE_LATENCY cycles after its `i`, and
may be read again a cycle later; `o` shows the words of the `i` of READ_LATENCY cycles ago. Free-running, a row a cycle.
Numerics: num.WordAdd.
"""

from amaranth import Cat, Module, Mux
from amaranth.lib import data, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.fixed_point import PV_BITS, SCORE_BITS
from nearflash.gateware.attention.engine.multiplexer import choose
from nearflash.gateware.attention.numerics.add import WordAdd
from nearflash.gateware.attention.numerics.product import PRODUCT
from nearflash.gateware.fp.pipeline import delay, register, wire

__all__ = ["BUFFER_WORDS", "Accumulators"]

BUFFER_WORDS = 128
"""Rows of scores for one set of heads: 1,024 tokens."""
_LANES = 4
_PAIR_BITS = 2 * SCORE_BITS


class Accumulators(wiring.Component):
    """`rows` rows of sums, a word for each of G heads and four lanes, and as many of scores as `blocks` buffers take.

    Parameters: heads (G); rows and blocks, powers of two.
    Members
    -------
    i : In, {address, scores, fresh, head, write, pair}: a row of sums, or of `scores`; `fresh`: take it as zero;
    `head`: which one's words go to `o`; `write`: add the products and write the lower or upper scores back, or, if
    both, all; `pair`: products are those of int4 codes.
    product : In, PRODUCT, array of G·4; borrow : In, a bit for each; a cycle after `i`.
    o : Out, words of the lanes of head `i.head`, array of 4.
    """

    #: Cycles from `i` to the write.
    WRITE_LATENCY = 1 + WordAdd.LATENCY
    #: Cycles from `i` to `o`.
    READ_LATENCY = 2

    def __init__(self, heads: int, rows: int, blocks: int) -> None:
        self._heads, self._rows, self._score_rows = heads, rows, blocks * BUFFER_WORDS
        row = data.StructLayout(
            {"address": 12, "scores": 1, "fresh": 1, "head": range(max(2, heads)), "write": 2, "pair": 1}
        )
        super().__init__(
            {
                "i": In(row),
                "product": In(PRODUCT).array(heads * _LANES),
                "borrow": In(heads * _LANES),
                "o": Out(PV_BITS).array(_LANES),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Cycle 0: read. Cycles 1, 2: add; choose a head. Cycle 3: write."""
        m = Module()
        i, count, late = self.i, self._heads * _LANES, self.WRITE_LATENCY
        largest, least = max(self._rows, self._score_rows), min(self._rows, self._score_rows)
        shorter = i.scores if self._rows >= self._score_rows else ~i.scores  # behind the other one
        address = wire(m, Cat(i.address[: (largest - 1).bit_length()], shorter))
        m.submodules.shared = shared = Memory(shape=count * _PAIR_BITS, depth=largest + least, init=[])
        m.submodules.upper = upper = Memory(shape=count * (PV_BITS - _PAIR_BITS), depth=self._rows, init=[])
        write, read = shared.write_port(granularity=SCORE_BITS), shared.read_port(domain="comb")
        upper_write, upper_read = upper.write_port(), upper.read_port(domain="comb")
        m.d.comb += [
            read.addr.eq(address),
            upper_read.addr.eq(i.address),
            write.addr.eq(delay(m, address, late)),
            upper_write.addr.eq(delay(m, i.address, late)),
            write.en.eq(delay(m, i.write, late).replicate(count)),
            upper_write.en.eq(delay(m, i.write.all() & ~i.scores, late)),
        ]
        # Read registers that are cleared: those of the block RAM.
        pairs, rest = register(m, Mux(i.fresh, 0, read.data)), register(m, Mux(i.fresh, 0, upper_read.data))
        words = [Cat(pairs.word_select(k, _PAIR_BITS), rest.word_select(k, PV_BITS - _PAIR_BITS)) for k in range(count)]
        scores, pair = register(m, i.scores), register(m, i.pair)
        for k, word in enumerate(words):
            m.submodules[f"add_{k}"] = add = WordAdd()
            m.d.comb += [
                add.i.eq(word),
                add.product.eq(self.product[k]),
                add.borrow.eq(self.borrow[k]),
                add.scores.eq(scores),
                add.pair.eq(pair),
                write.data.word_select(k, _PAIR_BITS).eq(add.o[:_PAIR_BITS]),
                upper_write.data.word_select(k, PV_BITS - _PAIR_BITS).eq(add.o[_PAIR_BITS:]),
            ]
        head = register(m, i.head)
        for lane, o in enumerate(self.o):
            m.d.comb += o.eq(register(m, choose(words[lane::_LANES], head)))
        return m
