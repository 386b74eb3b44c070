"""Dequantizer: beats of codes to beats of fp16 or bf16 values, q·s + m.

    i ──────────────────────────► CodeProduct ─► Add ─► ToNarrow ─► where present ─► o
    i_scale ─► FromNarrow: scale ──────┘          ▲
            └► FromNarrow: minimum ───────────────┘

Contract: a beat out for each beat in, in order. Where `scaled`, an element that is present is q·s + m with s and m of
its column group, an absent one +0; a row takes an item of `i_scale` for each 64 columns, the last group of a row may
have fewer. Else beats pass as they are and `i_scale` is not looked at. `scaled` and `bf16` stand while anything is
inside. Reset drops what is inside.

Timing: latency LATENCY cycles from a beat or, where that comes later, from an item of `i_scale`; one beat a cycle;
back-pressure: yes. o.valid comes from a register, o.payload from LUT RAM; i.ready depends on i_scale.valid.
Numerics: unsigned code -> fp16 or bf16; the product is exact (infinite past the range of fp32), the sum rounds to fp32,
then to the output's format, both to nearest even, subnormals kept; a NaN is the canonical one. Equals
nearflash.model.weights.dequantize.dequantize.
Limits: codes of more than 8 bits are cut.
"""

from collections.abc import Callable
from typing import Any, ClassVar

from amaranth import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.bitmap import SCALE_COLUMNS
from nearflash.abi.formats import FP16
from nearflash.gateware.fp.add import Add
from nearflash.gateware.fp.convert import FromNarrow, ToNarrow
from nearflash.gateware.fp.pipeline import delay
from nearflash.gateware.stream.credit import CreditPipeline
from nearflash.gateware.weights.code_product import CodeProduct

__all__ = ["Dequantizer"]

_ELEMENT_BITS = FP16.bits


class Dequantizer(wiring.Component):
    """Scales elements.

    Parameters
    ----------
    width : elements a beat (W), a power of two from 4 to 64.

    Members
    -------
    scaled : In, whether elements are codes.
    bf16 : In, format of scales, minima and values: bf16, else fp16.
    i : In stream of struct {data: W · 16 bits, present: W, last: 1}; `last` ends a row.
    i_scale : In stream of struct {scale: 16, minimum: 16}.
    o : Out stream of struct {data: W · 16 bits, last: 1}.

    Raises
    ------
    ValueError : another `width`.
    """

    _UNITS: ClassVar[tuple[Callable[[], Any], ...]] = (FromNarrow, CodeProduct, Add, ToNarrow)
    """What scales and minima go through, then what each element does."""

    def __init__(self, width: int) -> None:
        if width not in (4, 8, 16, 32, 64):
            raise ValueError(f"width must be a power of two from 4 to 64 elements, not {width!r}")
        self.width = width
        data_bits = width * _ELEMENT_BITS
        beat = data.StructLayout({"data": data_bits, "present": width, "last": 1})
        scale = data.StructLayout({"scale": _ELEMENT_BITS, "minimum": _ELEMENT_BITS})
        result = data.StructLayout({"data": data_bits, "last": 1})
        first, *others = self._UNITS
        self._unpackers = first(), first()
        self._lanes = [tuple(unit() for unit in others) for _ in range(width)]
        cycles = sum(unit.LATENCY for unit in (self._unpackers[0], *self._lanes[0]))
        self._pipeline = CreditPipeline(cycles, data.StructLayout({"beat": beat, "group": scale}), result)
        #: Cycles from `i` or `i_scale` to `o`.
        self.LATENCY = self._pipeline.LATENCY
        super().__init__(
            {
                "scaled": In(1),
                "bf16": In(1),
                "i": In(stream.Signature(beat)),
                "i_scale": In(stream.Signature(scale)),
                "o": Out(stream.Signature(result)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Streams around a lane for each element; scale and minimum are unpacked once for all of them."""
        m = Module()
        m.submodules.pipeline = pipeline = self._pipeline
        m.submodules.scale, m.submodules.minimum = scale, minimum = self._unpackers
        self._take(m)
        beat, group = pipeline.core_i.beat, pipeline.core_i.group
        plain, present, last = (
            delay(m, value, pipeline.core_latency) for value in (beat.data, beat.present, beat.last)
        )
        # Codes wait for the scale's unpacker, minima for the product.
        codes = delay(m, beat.data, scale.LATENCY)
        addend = delay(m, minimum.o, self._lanes[0][0].LATENCY)
        m.d.comb += [
            scale.i.eq(group.scale),
            minimum.i.eq(group.minimum),
            Cat(scale.bf16, minimum.bf16).eq(self.bf16.replicate(2)),
            pipeline.core_o.last.eq(last),
        ]
        for k, (product, add, narrow) in enumerate(self._lanes):
            m.submodules[f"product_{k}"], m.submodules[f"add_{k}"], m.submodules[f"narrow_{k}"] = product, add, narrow
            element, o = (value.word_select(k, _ELEMENT_BITS) for value in (plain, pipeline.core_o.data))
            m.d.comb += [
                product.code.eq(codes.word_select(k, _ELEMENT_BITS)),
                product.scale.eq(scale.o),
                add.a.eq(product.o),
                add.b.eq(addend),
                narrow.i.eq(add.o),
                narrow.bf16.eq(self.bf16),
                # An absent element is 0, not the minimum that its code 0 would give.
                o.eq(Mux(self.scaled, Mux(present[k], narrow.o, 0), element)),
            ]
        wiring.connect(m, pipeline.o, wiring.flipped(self.o))
        return m

    def _take(self, m: Module) -> None:
        """A beat with its group's scale; the group ends with its last column or with the row."""
        pipeline, beats = self._pipeline, SCALE_COLUMNS // self.width
        place, able, end = Signal(range(beats)), Signal(), Signal()
        m.d.comb += [
            able.eq(self.i_scale.valid | ~self.scaled),
            end.eq(self.i.payload.last | (place == beats - 1)),
            pipeline.i.valid.eq(self.i.valid & able),
            pipeline.i.payload.beat.eq(self.i.payload),
            pipeline.i.payload.group.eq(self.i_scale.payload),
            self.i.ready.eq(pipeline.i.ready & able),
            # One scale for many beats: it is kept until the group's last one.
            self.i_scale.ready.eq(pipeline.i.ready & self.i.valid & self.scaled & end),
        ]
        with m.If(self.i.valid & self.i.ready):
            m.d.sync += place.eq(Mux(end, 0, place + 1))
