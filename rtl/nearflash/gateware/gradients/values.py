"""Value rows: words of fp32, fp16 or bf16 values to rows of four fp32 values.

Contract: a row for every four values of a section, in order; a section's last word has `last`, and what its last row
holds past the values is not defined. `value_format` stands while words are inside. Reset drops half a row.

Timing: latency LATENCY cycle; a word a cycle, four values of 16 bits or two of 32; back-pressure: yes. o comes from
registers; i.ready depends on o.ready.
Numerics: exact; a NaN keeps its sign and payload. Equals nearflash.model.gradients.topk.fp32_pattern.
"""

from typing import Any

from amaranth import C, Cat, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.formats import BF16, FP16, FP32
from nearflash.abi.topk import ValueFormat
from nearflash.gateware.coding.kept_net import keep_net
from nearflash.gateware.fp.pipeline import digit_places, normalize_digit, wire

__all__ = ["ROW_PAIRS", "ValueRows", "ValueWord", "widen_fp16"]

ROW_PAIRS = 4
"""Pairs in a row: as many indices as a word has."""


class ValueWord(data.Struct):
    """A word of values; `last`: of its section."""

    data: 64
    last: 1


def widen_fp16(m: Module, bits: Value) -> Value:
    """fp32 pattern of an fp16 one: exact; combinational, all through a normaliser of two digits."""
    exponent = bits[FP16.mantissa_bits : 15]
    shifted: Value = Cat(bits[: FP16.mantissa_bits], exponent.any())
    digits = list[Value]()
    for place in digit_places(4):
        shifted, digit = normalize_digit(m, shifted, place)
        digits.insert(0, digit)
    zeros = keep_net(m, Cat(digits))  # leading ones: none of a normal number, 1 to 10 of a subnormal one, 15 of zero
    special, small = exponent.all(), ~exponent[-1]
    low = Mux((zeros == 0) | zeros.all(), 0, (1 - zeros)[:4])
    high = Cat(special | (small & (zeros <= 1)), (special | (small & ~zeros.all())).replicate(2), exponent[-1])
    zero = C(0, FP32.mantissa_bits - FP16.mantissa_bits)
    return wire(m, Cat(zero, shifted[: FP16.mantissa_bits], exponent[:4] | low, high, bits[15]))


class ValueRows(wiring.Component):
    """Widens values and collects them.

    Members
    -------
    i : In stream of ValueWord.
    value_format : In.
    o : Out stream of 4 · 32 bits.
    """

    #: Cycles from a row's last word to the row.
    LATENCY = 1

    i: In(stream.Signature(ValueWord))
    value_format: In(ValueFormat)
    o: Out(stream.Signature(ROW_PAIRS * FP32.bits))

    def elaborate(self, platform: Any) -> Module:
        """16-bit values fill a row at once, 32-bit ones half by half."""
        m = Module()
        word = self.i.payload.data
        second = Signal()
        halves = [word.word_select(k, 16) for k in range(ROW_PAIRS)]
        brains = Cat(Cat(C(0, FP32.bits - BF16.bits), half) for half in halves)
        narrow = Mux(self.value_format == ValueFormat.BF16, brains, Cat(widen_fp16(m, half) for half in halves))
        fp32 = self.value_format == ValueFormat.FP32
        row = Signal(ROW_PAIRS * FP32.bits, reset_less=True)
        taken = self.i.valid & self.i.ready
        m.d.comb += [self.i.ready.eq(self.o.ready | ~self.o.valid), self.o.payload.eq(row)]
        with m.If(self.o.ready):
            m.d.sync += self.o.valid.eq(0)
        with m.If(taken):
            m.d.sync += [
                self.o.valid.eq(~fp32 | second | self.i.payload.last),
                second.eq(fp32 & ~second & ~self.i.payload.last),
            ]
        for half, enable in enumerate((~fp32 | ~second, ~fp32 | second)):
            with m.If(taken & enable):
                m.d.sync += row.word_select(half, 64).eq(Mux(fp32, word, narrow.word_select(half, 64)))
        return m
