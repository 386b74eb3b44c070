"""From a logit to the weight of a token."""

from typing import Any

from amaranth.hdl import C, Cat, Module, Mux, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.fixed_point import LOGIT_BITS, LOGIT_LSB, REFERENCE_HEADROOM
from nearflash.abi.formats import FP16
from nearflash.gateware.attention.numerics.carry import carry_add
from nearflash.gateware.attention.numerics.exp2 import Exp2
from nearflash.gateware.fp.pipeline import delay, output, register, shift_right

__all__ = ["FLOOR_BITS", "ToWeight"]

FLOOR_BITS = LOGIT_BITS + LOGIT_LSB
_LARGEST = 0x7BFF
_DROP_ALL = FP16.mantissa_bits + 2
_FIELD_MOST = 30


class ToWeight(wiring.Component):
    """o = 2^(i - reference) · 2^7 in fp16, rounded to nearest even into the subnormals.

    Timing: latency LATENCY cycles, one result a cycle, free-running.
    Numerics: rounds twice, in the significand (Exp2), then, if subnormal, again; equals
    nearflash.model.attention.numerics.weight.to_weight.

    Members: i (signed, LOGIT_BITS, units of 2^LOGIT_LSB), reference (signed integer), o (fp16 bits), over (the weight
    passes the largest number, which o is then), floor (of i, signed integer).
    """

    LATENCY = Exp2.LATENCY + 2

    i: In(signed(LOGIT_BITS))
    reference: In(signed(FLOOR_BITS))
    o: Out(FP16.bits)
    over: Out(1)
    floor: Out(signed(FLOOR_BITS))

    def elaborate(self, platform: Any) -> Module:
        """Build the exponential and the packer."""
        m = Module()
        m.submodules.exp2 = exp2 = Exp2()
        m.d.comb += exp2.i.eq(self.i[:-LOGIT_LSB])
        # Cycle 0: the exponent field of a significand of 1024; from it, cycle 1: how many bits a subnormal drops.
        floor = self.i[-LOGIT_LSB:].as_signed()
        field = register(m, floor - self.reference + (REFERENCE_HEADROOM - 1 + FP16.bias))
        tiny, none = field < 1, field < 1 - _DROP_ALL
        drop = delay(m, Mux(none, _DROP_ALL, Mux(tiny, 1 - field, 0))[:4], 2)
        base = delay(m, Mux(tiny, 0, field - 1)[:5], 3)
        too_large = delay(m, field > _FIELD_MOST, 3)
        # Cycle 3: shift the significand; its guard bit is the least. Cycle 4: one sum packs and rounds.
        kept, sticky = shift_right(m, Cat(C(0, 1), exp2.o), drop)
        up = register(m, kept[0] & (sticky | kept[1]))
        kept = register(m, kept[1:])
        packed = carry_add(m, kept, Cat(C(0, FP16.mantissa_bits), base), up)
        over = too_large | packed[FP16.mantissa_bits : 15].all()
        o = output(m, self.o)
        m.d.sync += o.eq(Mux(over, _LARGEST, packed[:15]))
        m.d.comb += [self.over.eq(register(m, over)), self.floor.eq(delay(m, floor, self.LATENCY))]
        return m
