"""A unit with bit patterns at its ports, as benches, tests and area tables want it."""

from collections.abc import Collection
from typing import Any

from amaranth.hdl import C, Module, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In

from nearflash.abi.formats import FP32
from nearflash.gateware.fp.pipeline import delay
from nearflash.gateware.fp.raw import Pack, RawLayout, Unpack, widened

__all__ = ["Fp32Unit"]


class Fp32Unit(wiring.Component):
    """`core` between an Unpack for each RAW operand and a Pack for a RAW result.

    Timing: latency LATENCY cycles (the sum), one result a cycle, free-running.
    Numerics: those of `core`; a signaling NaN among the operands raises `invalid`.

    Parameters: core, with operands in RawLayout (24 significand bits, or more: padded with zeros), other inputs, o and
    perhaps flags (FLAGS); unpacked, names of operands to leave in RawLayout.
    Members: those of the core, with 32 bits instead of a RawLayout.
    """

    def __init__(self, core: Any, *, unpacked: Collection[str] = ()) -> None:
        self._core = core
        members = dict(core.signature.members)
        self._operands = [
            name for name, port in members.items() if port.flow == In and _is_raw(port) and name not in unpacked
        ]
        self._packs = _is_raw(members["o"])
        self._before = Unpack.LATENCY if self._operands else 0
        self._after = Pack.LATENCY if self._packs else 0
        self.LATENCY = self._before + core.LATENCY + self._after
        for name, port in members.items():
            if _is_raw(port) and name not in unpacked:
                members[name] = wiring.Member(port.flow, FP32.bits)
        super().__init__(members)

    def elaborate(self, platform: Any) -> Module:
        """Build the unit."""
        m = Module()
        core = m.submodules.core = self._core
        signaling: Value = C(0, 1)
        for name, port in core.signature.members.items():
            if name in self._operands:
                m.submodules[f"unpack_{name}"] = unpack = Unpack()
                m.d.comb += [unpack.i.eq(getattr(self, name)), getattr(core, name).eq(widened(unpack.o, port.shape))]
                signaling |= unpack.signaling
            elif port.flow == In:
                m.d.comb += getattr(core, name).eq(delay(m, getattr(self, name), self._before))
        result = core.o
        if self._packs:
            m.submodules.pack = pack = Pack()
            m.d.comb += pack.i.eq(core.o)
            result = pack.o
        m.d.comb += self.o.eq(result)
        if "flags" in core.signature.members:
            m.d.comb += self.flags.eq(delay(m, core.flags, self._after))
            with m.If(delay(m, signaling, core.LATENCY + self._after)):
                m.d.comb += self.flags.invalid.eq(1)
        return m


def _is_raw(member: Any) -> bool:
    return isinstance(member.shape, RawLayout)
