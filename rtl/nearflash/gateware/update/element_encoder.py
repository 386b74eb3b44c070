"""Element encoder: one fp32 value of m or v to its stored element, with its block's scale and a dither.

    fp32 ─► places below the block's largest ─► cut to 16 bits below the last that stays ─► + dither ─► code ─► o

Contract: a free-running datapath; `form` must stay as it is while anything is inside. Elements are the lowest bits of
`o`, which is zero above them.

Timing: latency LATENCY cycles; one value a cycle; back-pressure: no.
Numerics: fp32 -> fp32 as it is; bf16, the upper 16 bits of the pattern plus the dither; mx8, 16 bits below the last
mantissa bit kept, the dither added, the rest cut. Equals nearflash.model.update.state.encode to the bit.
Limits: a NaN must be the canonical one; with a scale that is less than a finite value's exponent field, codes mean
nothing.
"""

from amaranth import Cat, Module, Mux, Signal, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.formats import FP32
from nearflash.abi.optimizers.state import DITHER_BITS, MX8, BlockElement, StateFormat
from nearflash.gateware.stream.datapath import Datapath, Timed
from nearflash.gateware.update.block_scale import SCALE_BITS
from nearflash.gateware.update.state_form import FORM_BITS

__all__ = ["ElementEncoder"]

_KEPT_BITS = 1 + BlockElement.MANTISSA_BITS + DITHER_BITS
_SHIFT_BITS = 5


class ElementEncoder(wiring.Component):
    """Encodes elements of one array.

    Parameters
    ----------
    role : the array, "m" or "v".

    Members
    -------
    form : In, StateFormat.code.
    i : In, fp32 bits. scale : In, the block's scale byte. dither : In, 16 bits.
    o : Out, element.
    """

    #: Cycles from the inputs to `o`.
    LATENCY = 5

    def __init__(self, role: str) -> None:
        self.element = MX8[role]
        super().__init__(
            {
                "form": In(FORM_BITS),
                "i": In(FP32.bits),
                "scale": In(SCALE_BITS),
                "dither": In(DITHER_BITS),
                "o": Out(FP32.bits),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Registers have no reset: nothing looks at what they hold before the first value."""
        m = Module()
        element, path = self.element, Datapath(m)
        blocks, as_it_is = self.form == StateFormat.MX8.code, self.form == StateFormat.FP32.code
        field = self.i[FP32.mantissa_bits : -1]
        value, dither = Timed(self.i, 0), Timed(Mux(as_it_is, 0, self.dither), 0)
        special, normal = Timed(field.all(), 0), Timed(field.any(), 0)
        nonzero, sign = Timed(self.i[:-1].any(), 0), Timed(self.i[-1], 0)

        # Cycle 1: by how many places the value lies below the smallest normal one of the format.
        exponent = Cat(field[0] | ~field.any(), field[1:])
        below = Signal(signed(SCALE_BITS + 2), reset_less=True)
        m.d.sync += below.eq(self.scale - exponent + (1 - element.top))

        # Cycle 2: what that makes of its significand's shift, and of its exponent field less one.
        shift, base = Signal(_SHIFT_BITS, reset_less=True), Signal(element.exponent_bits, reset_less=True)
        small, far = below > 0, below[_SHIFT_BITS:].any()
        m.d.sync += [shift.eq(Mux(small, below | far.replicate(_SHIFT_BITS), 0)), base.eq(Mux(small, 0, -below))]

        # Cycle 3: the significand with 16 bits below the last that stays; of other formats the value.
        operand = Signal(FP32.bits, reset_less=True)
        bits = path.delay(value, 2)
        significand = Cat(bits[FP32.mantissa_bits + 1 - _KEPT_BITS : FP32.mantissa_bits], path.delay(normal, 2))
        m.d.sync += operand.eq(Mux(blocks, significand >> shift, bits))

        # Cycle 4: the sum.
        total = Signal(FP32.bits, reset_less=True)
        m.d.sync += total.eq(operand + path.delay(dither, 3))

        # Cycle 5: the element.
        code = Signal(element.exponent_bits + element.MANTISSA_BITS)
        m.d.comb += code.eq((path.delay(Timed(base, 2), 4) << element.MANTISSA_BITS) + total[DITHER_BITS:][:5])
        lost = path.delay(nonzero, 4) & ~code.any() & element.keeps_small
        stored = Cat(code[0] | lost, code[1:], path.delay(sign, 4) & code.any())[:8]
        narrow = Mux(path.delay(special, 4), element.not_a_number, stored)
        m.d.sync += self.o.eq(Mux(blocks, narrow, Mux(as_it_is, total, total[DITHER_BITS:])))
        return m
