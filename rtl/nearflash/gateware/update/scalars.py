"""Scalars of an update command: from register words to unpacked operands.

Only wires: scalars are zero or normal fp32 numbers, so nothing has to be normalised.
"""

from typing import Any

from amaranth import Cat, Module, Mux
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.formats import FP32
from nearflash.abi.registers import UPDATE
from nearflash.gateware.fp.raw import EXP_ZERO, SIG_BITS
from nearflash.gateware.update.lane import LaneScalars

__all__ = ["SCALARS", "UpdateScalars"]

SCALARS = ("decay", "m_decay", "m_gain", "v_decay", "v_gain", "eps", "pre_scale", "post_scale")
"""Registers that hold one fp32 scalar each."""


class UpdateScalars(wiring.Component):
    """Register words -> LaneScalars; combinational.

    Members
    -------
    i : In, one word a register: the fp32 SCALARS and `denominator_factor`.
    o : Out, LaneScalars.
    """

    def __init__(self) -> None:
        words = {name: Out(FP32.bits) for name in SCALARS} | {"denominator_factor": Out(64)}
        super().__init__({"i": In(wiring.Signature(words)), "o": Out(LaneScalars)})

    def elaborate(self, platform: Any) -> Module:
        """Split each word into sign, exponent and significand."""
        m = Module()
        for name in SCALARS:
            word, raw = getattr(self.i, name), self.o[name]
            biased = word[SIG_BITS - 1 : -1]
            zero = ~biased.any()
            m.d.comb += [
                raw.sig.eq(Mux(zero, 0, Cat(word[: SIG_BITS - 1], 1))),
                raw.exp.eq(Mux(zero, EXP_ZERO, biased - FP32.bias)),
                raw.sign.eq(word[-1]),
                raw.zero.eq(zero),
            ]
        fields = {field.name: field for field in UPDATE["denominator_factor"].fields}
        factor, word = self.o.denominator_factor, self.i.denominator_factor
        for member, field in (("sig", fields["significand"]), ("exp", fields["exponent"])):
            m.d.comb += factor[member].eq(word[field.lsb : field.lsb + field.width])
        return m
