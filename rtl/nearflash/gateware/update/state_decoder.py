"""State decoder: groups of stored elements of m or v, and of mx8 their scales, to groups of fp32 values.

Contract: a group out for each group in, in order, with its `last`. In format mx8 (only there) each 32 / lanes groups
take a scale from `i_scale`; a command has whole blocks. `form` must stay as it is while anything is inside.

Timing: latency LATENCY cycle from a group, SCALE_LATENCY from a block's scale; one group a cycle; back-pressure: yes.
o comes from registers; i.ready depends on o.ready.
Numerics: fp32, bf16 or mx8 -> fp32, exact; what is past the range of fp32 is infinite, the code of NaN the canonical
one. Equals nearflash.model.update.state.decode to the bit.
"""

from amaranth import Array, Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.formats import FP32
from nearflash.abi.optimizers.state import BLOCK_PARAMS, MX8, StateFormat
from nearflash.gateware.update.block_scale import SCALE_BITS
from nearflash.gateware.update.state_form import FORM_BITS, per_format

__all__ = ["StateDecoder", "narrow_group"]

_NAN = 0x7FC00000


def narrow_group(lanes: int) -> data.StructLayout:
    """Elements of `lanes` parameters side by side in the lowest bits, and whether the group is the last one."""
    return data.StructLayout({"data": FP32.bits * lanes, "last": 1})


class StateDecoder(wiring.Component):
    """Decodes one array.

    Parameters
    ----------
    lanes : parameters of a group, a power of two up to 8.
    role : the array, "m" or "v".

    Members
    -------
    form : In, StateFormat.code.
    i : In stream of `narrow_group`. i_scale : In stream of unsigned(8).
    o : Out stream of `narrow_group`, of fp32 values.
    """

    #: Cycles from a group to its values.
    LATENCY = 1
    #: Cycles from a scale to the values of its block's first group.
    SCALE_LATENCY = 2

    def __init__(self, lanes: int, role: str) -> None:
        self.lanes, self.element = lanes, MX8[role]
        super().__init__(
            {
                "form": In(FORM_BITS),
                "i": In(stream.Signature(narrow_group(lanes))),
                "i_scale": In(stream.Signature(SCALE_BITS)),
                "o": Out(stream.Signature(narrow_group(lanes))),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """The scale waits as what it adds to an exponent field."""
        m = Module()
        mx8 = self.form == StateFormat.MX8.code
        groups = BLOCK_PARAMS // self.lanes
        least, top = self.element.least_scale, self.element.top
        added, known, place = Signal(SCALE_BITS), Signal(), Signal(range(groups))
        able, step, end = Signal(), Signal(), Signal()
        scale = self.i_scale.payload
        m.d.comb += [
            able.eq(known | ~mx8),
            step.eq(self.i.valid & able & (self.o.ready | ~self.o.valid)),
            self.i.ready.eq(able & (self.o.ready | ~self.o.valid)),
            end.eq(step & mx8 & (place == groups - 1)),
            self.i_scale.ready.eq(~known | end),
        ]
        with m.If(self.i_scale.ready):
            m.d.sync += [known.eq(self.i_scale.valid), added.eq(Mux(scale > least, scale, least) - top)]
        with m.If(self.o.ready):
            m.d.sync += self.o.valid.eq(0)
        with m.If(step):
            m.d.sync += [self.o.valid.eq(1), self.o.payload.last.eq(self.i.payload.last)]
            for lane in range(self.lanes):
                m.d.sync += self.o.payload.data.word_select(lane, FP32.bits).eq(self._value(lane, added))
        with m.If(step & mx8):
            m.d.sync += place.eq(place + 1)
        return m

    def _value(self, lane: int, added: Signal) -> Value:
        words = {form: self.i.payload.data.word_select(lane, 8 * form.element_bytes) for form in StateFormat}
        upper = Cat(Const(0, 16), words[StateFormat.BF16])
        return per_format(self.form, words[StateFormat.FP32], upper, self._from_block(words[StateFormat.MX8], added))

    def _from_block(self, code: Value, added: Signal) -> Value:
        """A subnormal element, f·2^x with f of three bits, is normal in fp32: 1, 1f or 1ff shifted up."""
        element = self.element
        sign = code[-1] if element.signed else Const(0, 1)
        fraction, field = code[:3], code[3 : 3 + element.exponent_bits]
        small, zero = ~field.any(), ~code[: 3 + element.exponent_bits].any()
        raised = Mux(small, Array([-2, -2, -1, -1, 0, 0, 0, 0])[fraction], field)
        mantissa = Mux(small, Array([0, 0, 0, 4, 0, 2, 4, 6])[fraction], fraction)[:3]
        exponent = (added + raised)[: SCALE_BITS + 1]
        infinite = exponent[-1] | exponent[:-1].all()
        magnitude = Cat(
            Const(0, FP32.mantissa_bits - 3), Mux(infinite, 0, mantissa), exponent[:-1] | infinite.replicate(8)
        )
        value = Cat(Mux(zero, 0, magnitude), sign)
        return Mux(code == element.not_a_number, _NAN, value)
