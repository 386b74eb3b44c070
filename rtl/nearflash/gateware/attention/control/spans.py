"""Codewords of a token group that hold wanted tokens, four tokens a cycle.

Sizes in units of 8 bytes: a token's row is dim_rows units, a codeword 64. Separate pages: rows of K follow each other,
and V's page is laid out alike, its codewords numbered behind K's. Interleaved: K then V of each token.

Contract: `begin` forgets; each `step` adds the wanted ones of the next four tokens; LATENCY cycles after the last step
`codewords` holds all. Everything else holds still from `begin` on.
"""

from amaranth import Array, Cat, Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.codeword import CODEWORD_BYTES

__all__ = ["TokenSpans"]

_UNIT_BITS = (CODEWORD_BYTES // 8 - 1).bit_length()
_TOKENS = 4
_RELATIVE = 9
"""Codewords that four tokens can touch: 63 + 4·128 units."""
_PAGE_CODEWORDS = 32


class TokenSpans(wiring.Component):
    """Tokens to codewords.

    Members
    -------
    dim_rows : In, 1 to 64. interleaved : In. page_codewords : In, 8, 16 or 32.
    values : In, V is wanted too, else K alone.
    begin : In. step : In. wanted : In, bit k: token 4i + k of the i-th step since `begin`.
    codewords : Out, 64 bits, by codeword number.
    """

    #: Cycles from a step to its codewords.
    LATENCY = 3

    dim_rows: In(7)
    interleaved: In(1)
    page_codewords: In(6)
    values: In(1)
    begin: In(1)
    step: In(1)
    wanted: In(_TOKENS)
    codewords: Out(2 * _PAGE_CODEWORDS)

    def elaborate(self, platform: object) -> Module:
        """First and last codeword of each token, as bits from the step's first codeword on, moved to their place."""
        m = Module()
        stride, length = Signal(8), Signal(8)
        position = Signal(12)  # units from the page's start
        m.d.sync += [
            stride.eq(self.dim_rows << self.interleaved),
            length.eq(self.dim_rows << (self.interleaved & self.values)),
        ]
        with m.If(self.step):
            m.d.sync += position.eq(position + _TOKENS * stride)
        with m.If(self.begin):
            m.d.sync += position.eq(0)

        # Cycle 0: where the tokens begin and end.
        first, last = (Array(Signal(4, name=f"{n}_{k}") for k in range(_TOKENS)) for n in ("first", "last"))
        wanted, base = Signal(_TOKENS), Signal(position.shape().width - _UNIT_BITS)
        offset = position[:_UNIT_BITS]
        for token in range(_TOKENS):
            before, behind = Signal(9, name=f"before_{token}"), Signal(10, name=f"behind_{token}")
            before_later = Signal.like(before)
            m.d.comb += before.eq(sum(stride << bit for bit in range(2) if token >> bit & 1))
            m.d.sync += [before_later.eq(before), behind.eq(before + length - 1)]
            m.d.sync += [
                first[token].eq((offset + before_later) >> _UNIT_BITS),
                last[token].eq((offset + behind) >> _UNIT_BITS),
            ]
        m.d.sync += [wanted.eq(Mux(self.step, self.wanted, 0)), base.eq(position >> _UNIT_BITS)]

        # Cycle 1: their codewords, from the first one's on.
        relative, place = Signal(_RELATIVE), Signal.like(base)
        touched = [
            Cat(wanted[k] & (first[k] <= n) & (n <= last[k]) for k in range(_TOKENS)).any() for n in range(_RELATIVE)
        ]
        m.d.sync += [relative.eq(Cat(touched)), place.eq(base)]

        # Cycle 2: collect.
        page = Signal(_PAGE_CODEWORDS)
        with m.If(self.begin):
            m.d.sync += page.eq(0)
        with m.Else():
            m.d.sync += page.eq(page | (relative << place))
        twice = {count: Cat(page[:count], page[:count]) for count in (8, 16, 32)}
        m.d.comb += self.codewords.eq(page)
        with m.If(self.values & ~self.interleaved):
            with m.Switch(self.page_codewords):
                for count, both in twice.items():
                    with m.Case(count):
                        m.d.comb += self.codewords.eq(both)
        return m
