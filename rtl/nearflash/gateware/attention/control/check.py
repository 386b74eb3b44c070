"""Descriptor check: every rule for a descriptor's fields, and the numbers that follow from them.

The rules that a comparison decides are there SETTLE cycles after the descriptor; those that need a quotient, and the
quotients themselves, come out of one serial divider:

    d / m    S / n    S / T    (S - S mod T) / n    T / n    (S - l) / n

Contract: `start` begins the divisions; `done` rises when they are through and falls with the next `start`. `bad_field`
and `bad` hold for the descriptor at hand, which holds still from SETTLE cycles before `start` on.

Timing: DIVISIONS · 20 cycles from `start` to `done`.
Limits: what the rules are is stated in docs/contracts/attention.md, 3.
"""

from amaranth import Array, C, Cat, Module, Mux, Signal
from amaranth.hdl import Value
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.codeword import CODEWORD_BYTES
from nearflash.abi.attention.descriptor import DESCRIPTOR_BYTES, DESCRIPTOR_FIELDS, Mode
from nearflash.abi.attention.fixed_point import SCALE_LEAST_LOG2, SCALE_LIMIT_LOG2
from nearflash.abi.formats import FP32
from nearflash.abi.kernel.config import AttendConfig
from nearflash.gateware.attention.control.entry_ring import LINE_BITS, LINE_ENTRIES_LOG2
from nearflash.gateware.attention.control.interfaces import ADDRESS_BITS, BLOCK_BITS, GROUP_BITS
from nearflash.gateware.attention.engine.interfaces import CONTEXT_BITS, TOKEN_BITS

__all__ = ["DESCRIPTOR", "Derived", "DescriptorCheck"]

DESCRIPTOR = data.FlexibleLayout(
    8 * DESCRIPTOR_BYTES,
    {name: data.Field(8 * size, 8 * start) for name, (start, size) in DESCRIPTOR_FIELDS.items()},
)
"""A descriptor, by field name."""
_TOKENS_MAX, _HEADS = 1 << 17, 8
_REFERENCE_BITS = 12
_SCALE_LEAST, _SCALE_LIMIT = FP32.bias + SCALE_LEAST_LOG2, FP32.bias + SCALE_LIMIT_LOG2
"""Biased exponents."""


class Derived(data.Struct):
    """Values that follow from a descriptor's fields."""

    dim_rows: 7
    passes: 4
    limit_shift: 4
    page_codewords: 6
    row_codewords: 3
    index_rows: 7
    index_pages: 8
    blocks: BLOCK_BITS
    tail_tokens: 11
    tail_group: GROUP_BITS
    groups: GROUP_BITS
    entries: TOKEN_BITS
    local_entry: TOKEN_BITS
    base_shift: 4
    """log2 of the query rows of a context."""


class DescriptorCheck(wiring.Component):
    """Checks a descriptor against a build.

    Parameters
    ----------
    config : build configuration.

    Members
    -------
    descriptor : In, DESCRIPTOR. contexts : In, contexts in use, a power of two.
    start : In. done : Out.
    bad_field : Out, a field is outside its range. bad : Out, when done: that, or fields that do not fit together.
    derived : Out, Derived, when done. lines : Out, of four entries, when done; with `mask_beats` only.
    """

    #: Cycles from a descriptor to `bad_field`.
    SETTLE = 4
    DIVISIONS = 6

    def __init__(self, config: AttendConfig) -> None:
        self.config = config
        super().__init__(
            {
                **({"lines": Out(LINE_BITS)} if config.mask_beats else {}),
                "descriptor": In(DESCRIPTOR),
                "contexts": In(CONTEXT_BITS + 1),
                "start": In(1),
                "done": Out(1),
                "bad_field": Out(1),
                "bad": Out(1),
                "derived": Out(Derived),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Constants and rules in parallel, quotients one after the other."""
        m = Module()
        one = self.descriptor
        self._dense = (one.mode & Mode.DENSE) != 0
        self._page = (one.mode & Mode.PAGE) != 0
        self._constants(m)
        rules = [*self._ranges(), *self._fits(m)]
        wrong = Signal(len(rules))
        m.d.sync += [wrong.eq(~Cat(rules)), self.bad_field.eq(wrong.any())]

        ragged = Signal()  # T is no multiple of n
        self._divide(m, ragged)
        crowded = self._crowd(m)
        # A bad field makes quotients meaningless: `bad` holds either way.
        m.d.comb += self.bad.eq(self.bad_field | (~self._dense & (ragged | crowded)))
        return m

    def _crowd(self, m: Module) -> Signal:
        """Whether the head has more entries than there is room for."""
        one, derived, crowded = self.descriptor, self.derived, Signal()
        if self.config.mask_beats:  # whole lines, of all that there are
            total, room = self.lines, C(self.config.score_entries >> LINE_ENTRIES_LOG2)
            begun = (derived.entries + (1 << LINE_ENTRIES_LOG2) - 1) >> LINE_ENTRIES_LOG2
            m.d.sync += total.eq(begun * one.group[:4])
        else:
            # Contexts share the entries: the fewer there are, the more each of them has.
            total, room = Signal(TOKEN_BITS + 4), C(self.config.score_entries) >> self._context_log2
            m.d.sync += total.eq(derived.entries * one.group[:4])
        m.d.sync += crowded.eq((total > room) | (derived.entries > self.config.selector_keys))
        return crowded

    def _constants(self, m: Module) -> None:
        """Read small tables."""
        one, derived, config = self.descriptor, self.derived, self.config
        tokens = one.block_tokens[:11]
        codewords = Array((tokens + (1 << log2) - 1) >> log2 for log2 in (8, 9, 10, 10))[one.index_format[:2]]
        self._context_log2 = context_log2 = Signal(3)
        for log2 in range(CONTEXT_BITS + 1):
            with m.If(self.contexts[log2]):
                m.d.sync += context_log2.eq(log2)
        passes = (one.group[:4] + config.heads_per_beat - 1) >> (config.heads_per_beat.bit_length() - 1)
        m.d.sync += [
            derived.dim_rows.eq(one.dim >> 2),
            derived.passes.eq(passes),
            derived.row_codewords.eq(codewords),
            derived.base_shift.eq(config.query_rows.bit_length() - 1 - context_log2),
        ]
        shift = sum((one.score_dims > (1 << k) for k in range(8)), C(0, 4))
        m.d.sync += derived.limit_shift.eq(shift)
        for log2 in (12, 13, 14):
            # Two registers: `index_rows` follows `row_codewords` by a cycle, within SETTLE.
            count = (1 << log2) // CODEWORD_BYTES
            with m.If(one.page_log2 == log2):
                m.d.sync += derived.page_codewords.eq(count)
                m.d.sync += derived.index_rows.eq(
                    # Row counts of 0 are refused elsewhere; the table must not divide by them.
                    Array(count // max(row, 1) for row in range(8))[derived.row_codewords]
                )

    def _ranges(self) -> list[Value]:
        """Rules for one field each, true where they hold."""
        one, dense = self.descriptor, self._dense
        exponent = one.scale[FP32.mantissa_bits : -1]
        addresses = [one[f"{name}_address"] for name in ("q", "v_mean", "out", "index_table", "token_table")]
        fixed = (one.mode & Mode.REFERENCE) != 0
        references = [one[f"reference_{head}"] for head in range(_HEADS)]
        small = [~(r[_REFERENCE_BITS - 1 :].any() & ~r[_REFERENCE_BITS - 1 :].all()) for r in references]
        return [
            one.mode < 1 << len(Mode),
            (one.group >= 1) & (one.group <= _HEADS),
            (one.dim[:2] == 0) & (one.dim != 0) & (one.dim <= 256),
            (one.tokens != 0) & (one.tokens <= _TOKENS_MAX),
            (one.group_tokens[:2] == 0) & (one.group_tokens != 0) & (one.group_tokens <= 64),
            one.interleaved <= 1,
            (one.page_log2 >= 12) & (one.page_log2 < self.config.page_bytes.bit_length()),
            ~one.scale[-1] & (exponent >= _SCALE_LEAST) & (exponent < _SCALE_LIMIT),
            *(~address[:3].any() & ~address[ADDRESS_BITS:].any() for address in addresses),
            Cat(~fixed, Cat(small).all()).any(),
            ~dense | fixed,
            dense | ((one.score_dims != 0) & (one.score_dims <= one.dim)),
            dense | ((one.top_k != 0) & (one.top_k <= one.tokens)),
            dense | ((one.block_tokens[:4] == 0) & (one.block_tokens != 0) & (one.block_tokens <= 1024)),
            dense | (one.index_format <= 2),
            (one.top_p == 0) | ((one.mode & Mode.PROBABILITY) != 0),
        ]

    def _fits(self, m: Module) -> list[Value]:
        """Rules for products of fields: a token group in its page, a context's share of the query memories."""
        one, derived = self.descriptor, self.derived
        group, query = Signal(12), Signal(12)  # in units of four tokens' rows of 8 bytes; in query rows
        m.d.sync += [
            group.eq((one.group_tokens[2:7] * one.dim[2:9]) << one.interleaved[0]),
            query.eq(derived.passes * derived.dim_rows),
        ]
        return [
            group <= (1 << (one.page_log2[:4] - 5)[:4]),
            query <= (1 << derived.base_shift),
            query <= self.config.gather_slots * self.config.query_rows // self.config.contexts,
            (derived.passes <= self.config.score_blocks) | self._dense,
        ]

    def _divide(self, m: Module, ragged: Signal) -> None:
        """The divisions, in order; what a quotient gives is kept in its last cycle."""
        one, derived = self.descriptor, self.derived
        step, left = Signal(range(self.DIVISIONS + 1), init=self.DIVISIONS), Signal(range(TOKEN_BITS + 2))
        value, divisor, rest = Signal(TOKEN_BITS), Signal(11), Signal(12)
        beyond = Signal(TOKEN_BITS)  # first token of the local window
        tokens, n, t = one.tokens[:TOKEN_BITS], one.group_tokens[:7], one.block_tokens[:11]
        # A window longer than the head covers all of it.
        m.d.sync += beyond.eq(Mux(one.local_window < one.tokens, one.tokens - one.local_window, 0))
        operands = [(one.dim, derived.index_rows), (tokens, n), (tokens, t), (tokens - derived.tail_tokens, n), (t, n),
                    (beyond, n)]  # fmt: skip
        # Restoring division: the dividend leaves `value` at the top as the quotient comes in below.
        doubled = Cat(value[-1], rest)[:12]
        fits = doubled >= divisor
        up = value + (rest != 0)
        m.d.comb += self.done.eq(step == self.DIVISIONS)
        with m.If(self.start):
            m.d.sync += [step.eq(0), left.eq(TOKEN_BITS + 1)]
        with m.Elif(~self.done):
            m.d.sync += [left.eq(left - 1), value.eq(Cat(fits, value)), rest.eq(doubled - Mux(fits, divisor, 0))]
            with m.If(left == TOKEN_BITS + 1):
                m.d.sync += [rest.eq(0), value.eq(Array(a for a, _ in operands)[step])]
                m.d.sync += divisor.eq(Array(b for _, b in operands)[step])
            with m.If(left == 0):
                m.d.sync += [step.eq(step + 1), left.eq(TOKEN_BITS + 1)]
                with m.Switch(step):
                    with m.Case(0):
                        m.d.sync += derived.index_pages.eq(up)
                    with m.Case(1):
                        m.d.sync += [derived.groups.eq(up), derived.entries.eq(Mux(self._page, up, one.tokens))]
                    with m.Case(2):
                        m.d.sync += [derived.blocks.eq(value), derived.tail_tokens.eq(rest)]
                    with m.Case(3):
                        m.d.sync += derived.tail_group.eq(value)
                    with m.Case(4):
                        m.d.sync += ragged.eq(rest != 0)
                    with m.Case(5):
                        local = Mux(self._page, value, beyond)
                        m.d.sync += derived.local_entry.eq(Mux(one.local_window == 0, derived.entries, local))
