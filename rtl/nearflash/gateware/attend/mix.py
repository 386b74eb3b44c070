"""Output of a head: what its tokens say and what the mean of all values says, in the shares alpha and 1 - alpha.

    sum ─► ToRaw ─┬─► denominators[head]              v_mean[element] ─► Unpack ─┐
                  └─► Div ─┬─► alpha[head]                                       ▼
                           └─► Mul by alpha[head] ─────────────────────────► MulAdd ─┬─► ToNarrow ─► o
                                                        rest[head] ─► factor ──┘     └─► rest[head]

The shares of a head go through first, as quotients of their own: alpha is kept, and 1 - alpha is made by the same
multipliers, as fma(1, 1, -alpha).
"""

from typing import Any

from amaranth.hdl import Module, Signal, Value, signed
from amaranth.lib import data, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.abi.attend.numbers import EXACT_LSB, PV_BITS
from nearflash.abi.formats import FP16
from nearflash.gateware.attn.interfaces import HEAD_BITS
from nearflash.gateware.datapath import Datapath, Timed, select
from nearflash.gateware.fp.convert import ToNarrow
from nearflash.gateware.fp.div import Div
from nearflash.gateware.fp.mul import Mul
from nearflash.gateware.fp.muladd import MulAdd
from nearflash.gateware.fp.raw import RAW, SIG_BITS, Unpack
from nearflash.gateware.num.raw import ToRaw

__all__ = ["Mix", "MixItem"]

_HEADS = 1 << HEAD_BITS
_DIM_MAX = 256
_LEADING = 1 << SIG_BITS - 1
_ONE, _MINUS_ONE = RAW.const({"sig": _LEADING}), RAW.const({"sig": _LEADING, "sign": 1})
_MINUS_ZERO = RAW.const({"sign": 1, "zero": 1})


class MixItem(data.Struct):
    """One integer that goes in; those of all heads of a kind follow one another."""

    sum: signed(PV_BITS)
    denominator: 1
    """By which the numerators of this head, further items, are divided."""
    share: 1
    """A part of alpha; else of the output."""
    head: HEAD_BITS
    element: range(_DIM_MAX)
    """Of an output's numerator."""


class Mix(wiring.Component):
    """Outputs of a head from its exact sums.

    Contract: items come in this order: denominators of the shares, numerators of the shares, when `busy` has fallen the
    denominators of the output, then its numerators, any head and element first; v_mean is there before the latter.

    Timing: latency LATENCY cycles; one item a cycle; no back-pressure.
    Numerics: integers -> fp32 (RNE), o = fp16(fma(fl32(1 - alpha), v_mean, fl32(alpha * fl32(N / l)))), RNE, and
    fp16(fl32(N / l)) where alpha is 1; equals nearflash.model.attend.gather.finish to the bit.

    Members
    -------
    i : In, MixItem. i_valid : In.
    mean : In, {valid, address (7), word (64)}: elements 2·address and 2·address + 1 of v_mean, fp32.
    o : Out, fp16. o_valid : Out.
    busy : Out, items are under way.
    """

    def __init__(self) -> None:
        self._units: dict[str, Any] = {
            "to_raw": ToRaw(signed(PV_BITS), EXACT_LSB), "quotient": Div(), "product": Mul(), "unpack": Unpack(),
            "mix": MulAdd(), "narrow": ToNarrow(),
        }  # fmt: skip
        #: Cycles from i to o.
        self.LATENCY = sum(unit.LATENCY for name, unit in self._units.items() if name != "unpack")
        super().__init__(
            {
                "i": In(MixItem),
                "i_valid": In(1),
                "mean": In(data.StructLayout({"valid": 1, "address": 7, "word": 64})),
                "o": Out(FP16.bits),
                "o_valid": Out(1),
                "busy": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """In dataflow order; `Datapath` inserts the delays."""
        m = Module()
        path = Datapath(m)
        valid = Signal(self.LATENCY)
        m.d.sync += valid.eq(Value.cast(self.i_valid) | valid << 1)
        flags = Timed(self.i.as_value(), 0)

        def at(cycle: int) -> data.View:
            """The item without its sum, as it is in `cycle`."""
            kept = path.delay(Timed(rest_of_item, 0), cycle)
            return data.View(_TAG, kept)

        rest_of_item = flags.value[PV_BITS:]
        raw = path.call("to_raw", self._units["to_raw"], i=Timed(self.i.sum, 0))
        item = at(raw.cycle)
        denominator = self._table(m, "denominators", item.head, raw.value, valid[raw.cycle - 1] & item.denominator)
        quotient = path.call("quotient", self._units["quotient"], a=raw, b=Timed(denominator, raw.cycle))
        item = at(quotient.cycle)
        is_share = valid[quotient.cycle - 1] & item.share & ~item.denominator
        alpha = self._table(m, "alpha", item.head, quotient.value, is_share)
        factor = Timed(select(item.share, _MINUS_ONE, alpha), quotient.cycle)
        product = path.call("product", self._units["product"], a=quotient, b=factor)

        mixed_cycle = product.cycle + self._units["mix"].LATENCY
        item, late = at(product.cycle), at(mixed_cycle)
        is_share = valid[mixed_cycle - 1] & late.share & ~late.denominator
        rest = self._table(m, "rest", item.head, self._units["mix"].o, is_share, late.head)
        mean = self._mean(m, path, at, product.cycle)
        mean = select(item.share, _ONE, select(rest.zero, _MINUS_ZERO, mean))  # fma(0, -0, x) is x, -0 too
        mixed = path.call(
            "mix", self._units["mix"], a=Timed(mean, product.cycle),
            b=Timed(select(item.share, _ONE, rest), product.cycle), c=product, fused=1,
        )  # fmt: skip
        narrow = path.call("narrow", self._units["narrow"], i=mixed, bf16=0)
        item = at(narrow.cycle)
        m.d.comb += [
            self.o.eq(narrow.value),
            self.o_valid.eq(valid[-1] & ~item.share & ~item.denominator),
            self.busy.eq(valid.any()),
        ]
        return m
