"""The product of a code and its scale, in fp32."""

from typing import Any

from amaranth import C, Cat, Module, Mux
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.formats import FP16, FP32, INT8
from nearflash.gateware.fp.pipeline import delay, digit_places, normalize_digit, register, wire
from nearflash.gateware.fp.raw import EXP_ZERO, RAW, SIG_BITS

__all__ = ["CodeProduct"]

_CODE_BITS = INT8.bits
_SCALE_BITS = FP16.mantissa_bits + 1
_PRODUCT_BITS = _CODE_BITS + _SCALE_BITS


class CodeProduct(wiring.Component):
    """o = code · scale.

    Timing: latency LATENCY cycles, one result a cycle, free-running; multiplexers behind the last register.
    Numerics: exact, but infinite past the range of fp32; 0 · inf is a NaN, 0 · s a zero of the sign of s.
    Limits: the scale is a value of fp16 or bf16: its significand's bits below the 11th are not looked at.

    Members: code (8, unsigned), scale, o (RAW).
    """

    LATENCY = 2

    code: In(_CODE_BITS)
    scale: In(RAW)
    o: Out(RAW)

    def elaborate(self, platform: Any) -> Module:
        """Build the multiplier."""
        m = Module()
        scale = self.scale
        # Cycle 0: a code whose top bit is set.
        code, digits = self.code, list[Any]()
        for place in digit_places((_CODE_BITS - 1).bit_length()):
            code, digit = normalize_digit(m, code, place)
            digits.insert(0, digit)
        empty, code_1, zeros_1 = ~self.code.any(), register(m, code), register(m, Cat(digits))
        significand_1 = register(m, scale.sig[-_SCALE_BITS:])
        exps_1 = [register(m, scale.exp + (_CODE_BITS - 1 + carry)) for carry in range(2)]
        nan = scale.nan | (scale.inf & empty)
        zero = (scale.zero | empty) & ~nan
        sign, zero, inf, nan = (delay(m, flag, self.LATENCY) for flag in (scale.sign, zero, scale.inf & ~empty, nan))
        # Cycle 1: multiply; the exponents of a product in [1, 2) and of one in [2, 4).
        product = register(m, code_1 * significand_1)
        exps_2 = [register(m, (exp - zeros_1)[: len(scale.exp)]) for exp in exps_1]
        # Behind the last cycle: normalise.
        exp = wire(m, Mux(product[-1], exps_2[1], exps_2[0]).as_signed())
        beyond = exp > FP32.bias
        m.d.comb += [
            self.o.sig.eq(Cat(C(0, SIG_BITS - _PRODUCT_BITS), Mux(product[-1], product, product << 1)[:_PRODUCT_BITS])),
            self.o.exp.eq(Mux(zero, EXP_ZERO, exp)),
            Cat(self.o.sign, self.o.zero, self.o.nan).eq(Cat(sign, zero, nan)),
            self.o.inf.eq(inf | (beyond & ~zero & ~nan)),
        ]
        return m
