"""Between fp32 and the two 16-bit formats, chosen at run time."""

from typing import Any

from amaranth.hdl import Module, Mux
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.formats import BF16, FP16
from nearflash.gateware.fp.pipeline import delay
from nearflash.gateware.fp.raw import FLAGS, RAW, Pack, Unpack, widen
from nearflash.gateware.fp.round import UNROUNDED, Round

__all__ = ["FromNarrow", "ToNarrow"]


class ToNarrow(wiring.Component):
    """RAW -> fp16 or bf16 bit pattern.

    Timing: latency LATENCY cycles, one result a cycle, free-running.
    Numerics: rounds to nearest even, subnormals kept; a finite value past the format's largest becomes infinite and
    raises `overflow`; equals nearflash.model.fp.convert to the bit, exceptions too.

    Members: i (RAW), bf16 (1: bf16, 0: fp16; goes with its operand), o (16), flags (FLAGS).
    """

    i: In(RAW)
    bf16: In(1)
    o: Out(FP16.bits)
    flags: Out(FLAGS)

    def __init__(self) -> None:
        self._round = Round(formats=(FP16, BF16))
        self.LATENCY = self._round.LATENCY + Pack.LATENCY
        super().__init__()

    def elaborate(self, platform: Any) -> Module:
        """Build the converter."""
        m = Module()
        m.submodules.round = rounder = self._round
        m.submodules.pack_fp16 = fp16 = Pack(FP16)
        m.submodules.pack_bf16 = bf16 = Pack(BF16)
        m.d.comb += [
            rounder.i.eq(widen(self.i, UNROUNDED)),
            rounder.select.eq(self.bf16),
            fp16.i.eq(rounder.o),
            bf16.i.eq(rounder.o),
            self.o.eq(Mux(delay(m, self.bf16, self.LATENCY), bf16.o, fp16.o)),
            self.flags.eq(delay(m, rounder.flags, Pack.LATENCY)),
        ]
        return m


class FromNarrow(wiring.Component):
    """fp16 or bf16 bit pattern -> RAW. Exact.

    Timing: latency LATENCY cycles, one result a cycle, free-running.

    Members: i (16), bf16 (1: bf16, 0: fp16; goes with its operand), o (RAW).
    """

    LATENCY = Unpack.LATENCY

    i: In(FP16.bits)
    bf16: In(1)
    o: Out(RAW)

    def elaborate(self, platform: Any) -> Module:
        """Build the converter."""
        m = Module()
        m.submodules.unpack_fp16 = fp16 = Unpack(FP16)
        m.submodules.unpack_bf16 = bf16 = Unpack(BF16)
        picked = Mux(delay(m, self.bf16, self.LATENCY), bf16.o.as_value(), fp16.o.as_value())
        m.d.comb += [fp16.i.eq(self.i), bf16.i.eq(self.i), self.o.eq(data.View(RAW, picked))]
        return m
