"""The one rounder of every floating point unit: nearest, ties to even, subnormals kept.

The position of the last kept bit depends on the exponent where the result is subnormal. Instead of shifting there and
back, the bits below that position are set (to round up: a carry into bit 0 then runs through them) or cleared (to round
down), so that one carry chain over the significand and the exponent does all cases.
"""

from typing import Any

from amaranth.hdl import Array, C, Cat, Module, Mux, Signal, Value
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.formats import FP32, NumberFormat
from nearflash.gateware.fp.pipeline import delay, output, register, wire
from nearflash.gateware.fp.raw import EXP_ZERO, FLAGS, RAW, SIG_BITS, RawLayout

__all__ = ["UNROUNDED", "Round", "to_unrounded"]

#: A result before rounding: an fp32 significand, a guard bit, and a sticky bit that stands for all lower ones.
UNROUNDED = RawLayout(SIG_BITS + 2)
_DROP_ALL = 31


def to_unrounded(number: Any) -> data.View:
    """A view in RawLayout with a longer significand, as the rounder takes it: the low bits become one sticky bit."""
    extra = number.shape().sig_bits - SIG_BITS - 1
    sig = Cat(number.sig[:extra].any(), number.sig[extra:])
    fields = Cat(sig, number.exp, number.sign, number.zero, number.inf, number.nan)
    return data.View(UNROUNDED, fields)


class Round(wiring.Component):
    """UNROUNDED -> RAW in fp32, or in a narrower format chosen at run time.

    Timing: latency LATENCY cycles (3; 1 without `subnormals`), one result a cycle, free-running.
    Numerics: rounds once, to nearest even; past the largest finite value the result is infinite and `overflow` raised;
    `underflow` is raised for an inexact result that is tiny after rounding.

    Parameters: subnormals: the input can lie below the normal range with bits to round there; a sum of two fp32 values
    or a square root cannot. formats: of the result; with more than one, `select` is an index into them.
    Members: i (UNROUNDED), invalid and div_by_zero (exceptions of the operation, passed on), keep (leave the number as
    it is, its exponent too), select, o (RAW), flags (FLAGS).

    Raises ValueError for several formats without `subnormals`, or none.
    """

    def __init__(self, *, subnormals: bool = True, formats: tuple[NumberFormat, ...] = (FP32,)) -> None:
        if not formats or (len(formats) > 1 and not subnormals):
            raise ValueError(f"formats must be one, or several with subnormals, not {[f.name for f in formats]!r}")
        self.subnormals, self.formats = subnormals, formats
        self.LATENCY = 3 if subnormals else 1
        super().__init__(
            {
                "i": In(UNROUNDED),
                "invalid": In(1),
                "div_by_zero": In(1),
                "keep": In(1),
                "select": In(range(len(formats))),
                "o": Out(RAW),
                "flags": Out(FLAGS),
            }
        )

    def elaborate(self, platform: Any) -> Module:
        """Build the rounder."""
        m = Module()
        i, bits, sticky = self.i, self.i.sig[1:], self.i.sig[0]
        fallen, tiny = C(0, len(bits)), C(0, 1)
        inexact, up = bits[0] | sticky, bits[0] & (bits[1] | sticky)
        if self.subnormals:
            # Cycle 0: how many bits fall beside the guard bit. Cycle 1: which ones, and does their value round up?
            drop, tiny, select, keep = (register(m, v) for v in (*self._drop(), self.select, self.keep))
            bits, sticky = register(m, bits), register(m, sticky)
            fallen = wire(m, Cat(k < drop for k in range(len(bits))))
            rest = (bits & fallen).any() | sticky
            guard, last = (Cat(bits, C(0, 8))[first:].bit_select(drop, 1) for first in (0, 1))
            tiny &= ~self._reaches_normal(bits, drop, select)
            inexact, up = register(m, guard | rest), register(m, guard & (rest | last) & ~keep)
            bits, fallen, tiny = register(m, bits), register(m, fallen), register(m, tiny)
        exp, sign, zero, inf, nan, invalid, div_by_zero, keep, select = (
            delay(m, value, self.LATENCY - 1)
            for value in (i.exp, i.sign, i.zero, i.inf, i.nan, self.invalid, self.div_by_zero, self.keep, self.select)
        )
        # Last cycle: one carry chain over significand and exponent. Where all bits fall, none is left or the carry is.
        total = Signal(SIG_BITS - 1 + len(exp))
        bits, fallen = bits[1:], fallen[:-1]
        m.d.comb += total.eq(Cat(Mux(up, bits | fallen, bits & ~fallen)[:-1], exp) + up)
        finite = ~(zero | inf | nan)
        flushed = zero | (fallen[-1] & ~up)
        overflow = finite & ~keep & self._exceeds(total[SIG_BITS - 1 :], select)
        o, flags = output(m, self.o), output(m, self.flags)
        m.d.sync += [
            o.sig.eq(Cat(total[: SIG_BITS - 1], C(1, 1))),
            o.exp.eq(total[SIG_BITS - 1 :]),
            Cat(o.sign, o.nan, o.inf).eq(Cat(sign, nan, inf | overflow)),
            o.zero.eq(flushed & ~inf & ~nan),
            Cat(flags.invalid, flags.div_by_zero).eq(Cat(invalid, div_by_zero)),
            flags.overflow.eq(overflow),
            flags.underflow.eq(finite & tiny & inexact & ~keep),
            flags.inexact.eq(finite & (inexact & ~keep | overflow)),
        ]
        with m.If(flushed):
            m.d.sync += [o.sig.eq(0), o.exp.eq(EXP_ZERO)]
        return m

    def _by_format(self, values: list[Any], select: Value) -> Value:
        return Mux(select, values[1], values[0]) if len(values) > 1 else Value.cast(values[0])

    def _drop(self) -> tuple[Value, Value]:
        """Number of significand bits that fall (31: all), and whether the exponent is below the normal range."""
        drops, tinies = [], []
        for number in self.formats:
            least, base = 1 - number.bias, _base(number)
            # 32 exponents in a row differ in their low five bits.
            table = Array(C(min(_DROP_ALL, base + (least - low) % 32), 5) for low in range(32))
            tiny, lost = self.i.exp < least, self.i.exp < least - 31
            drops.append(Mux(lost, _DROP_ALL, Mux(tiny, table[self.i.exp[:5]], base)))
            tinies.append(tiny)
        tiny = self._by_format(tinies, self.select)
        return Mux(self.keep, 0, self._by_format(drops, self.select)), tiny

    def _reaches_normal(self, bits: Value, drop: Value, select: Value) -> Value:
        """Just below the normal range, but rounded to full precision it would be in it: then it is not tiny."""
        return self._by_format([bits[_base(f) :].all() & (drop == _base(f) + 1) for f in self.formats], select)

    def _exceeds(self, exp: Value, select: Value) -> Value:
        return self._by_format([~exp[-1] & exp[f.exponent_bits - 1 : -1].any() for f in self.formats], select)


def _base(number: NumberFormat) -> int:
    """Significand bits of fp32 that a normal value of a narrower format does not have."""
    return SIG_BITS - 1 - number.mantissa_bits
