"""Bench of the dequantizer, beats of four elements; short units stand in for those of its datapath.

They add without carry, so that a result is a code's only with the scale and the minimum that belong to it. The real
units are free-running as these are, and tests compare them with the model.
"""

from types import SimpleNamespace
from typing import Any

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.bitmap import SCALE_COLUMNS
from nearflash.gateware.fp.pipeline import delay
from nearflash.gateware.weights.dequantize import Dequantizer
from nearflash.verify.proofs.proof import Bench
from nearflash.verify.proofs.properties import accept, check_source, moves, offer

__all__ = ["ShortDequantizer", "dequantize"]

_WIDTH, _BITS = 4, 16
_GROUP_BEATS = SCALE_COLUMNS // _WIDTH


class _Sum(wiring.Component):
    """The inputs without carry, `latency` cycles later."""

    def __init__(self, latency: int, *inputs: str) -> None:
        self.LATENCY, self._names = latency, inputs
        super().__init__({name: In(_BITS) for name in inputs} | {"bf16": In(1), "o": Out(_BITS)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        total = self.bf16.replicate(_BITS)
        for name in self._names:
            total ^= getattr(self, name)
        m.d.comb += self.o.eq(delay(m, total, self.LATENCY))
        return m


class ShortDequantizer(Dequantizer):
    """With the units that stand in: a cycle to where code and scale meet, one to where the minimum does."""

    _UNITS = (lambda: _Sum(1, "i"), lambda: _Sum(1, "code", "scale"), lambda: _Sum(0, "a", "b"), lambda: _Sum(0, "i"))


def dequantize(dut: Any = None) -> Bench:
    """A beat for a beat, in order, each with its group's scale; an item of scales for each group.

    The solver marks any beat, and that one is followed by its `last`; that the elements of a beat stay with it is the
    credit pipeline's (proof stream.credit), whose datapath gives here what its beat and its scale come to.
    """
    dut = ShortDequantizer(_WIDTH) if dut is None else dut
    bench = Bench(dut)
    m, capacity = bench.m, dut.LATENCY + 1
    offer(bench, dut.i)
    offer(bench, dut.i_scale, "i_scale")
    accept(bench, dut.o)
    check_source(bench, SimpleNamespace(valid=dut.o.valid, ready=dut.o.ready, payload=dut.o.payload.last))
    scaled, bf16, beat = bench.free(1, "scaled"), bench.free(1, "bf16"), dut.i.payload
    m.d.comb += [dut.scaled.eq(scaled), dut.bf16.eq(bf16)]

    inside, place = Signal(range(capacity + 2)), Signal(range(_GROUP_BEATS))
    enters, leaves = moves(dut.i), moves(dut.o)
    ends = beat.last | (place == _GROUP_BEATS - 1)
    m.d.sync += inside.eq(inside + enters - leaves)
    with m.If(enters):
        m.d.sync += place.eq(Mux(ends, 0, place + 1))
    modes = Cat(scaled, bf16)
    bench.assume(((inside == 0) & (place == 0)) | (modes == bench.past(modes, "modes_past")))

    marked, tracked, ahead, last = Signal(), Signal(), Signal(range(capacity + 2)), Signal()
    mark = enters & ~marked & bench.free(1, "mark")
    m.d.sync += marked.eq(marked | mark)
    with m.If(mark):
        m.d.sync += [tracked.eq(1), ahead.eq(inside - leaves), last.eq(beat.last)]
    with m.Elif(tracked & leaves):
        m.d.sync += [tracked.eq(ahead != 0), ahead.eq(Mux(ahead == 0, 0, ahead - 1))]
    due = tracked & (ahead == 0)
    able = dut.i_scale.valid | ~scaled
    bench.prove("nothing_invented", ~dut.o.valid | (inside != 0))
    bench.prove("capacity_kept", inside <= capacity)
    bench.prove("same_last", ~(dut.o.valid & due) | (dut.o.payload.last == last))
    bench.prove("a_beat_with_its_scale", ~(enters & scaled) | dut.i_scale.valid)
    bench.prove("a_scale_for_each_group", moves(dut.i_scale) == (enters & scaled & ends))
    bench.prove("no_scale_unless_scaled", scaled | ~dut.i_scale.ready)
    bench.prove("takes_a_beat_when_there_is_room", dut.i.ready == (able & (inside != capacity)))
    bench.prove("empty_after_reset", ~bench.was_reset | ~dut.o.valid)
    bench.no_paths += [(dut.o.ready, dut.i.ready), (dut.i.valid, dut.o.valid), (dut.i.valid, dut.i.ready)]
    bench.cover("full", inside == capacity)
    bench.cover("a_second_group", moves(dut.i_scale) & ~beat.last & (place != 0) & (inside > 1))
    bench.cover("a_row_leaves", leaves & due & last)
    _datapath(bench, dut, enters)
    return bench


def _datapath(bench: Bench, dut: Any, enters: Any) -> None:
    """What reaches the queue is the sum of a beat's codes, of its scale and minimum, where an element is present."""
    beat, scale, shape = dut.i.payload, dut.i_scale.payload, dut.o.payload.shape()
    cycles = dut.LATENCY - 1
    entered, bits = enters, Cat(beat.as_value(), scale.scale, scale.minimum)
    modes = Cat(dut.scaled, dut.bf16)
    for k in range(cycles):
        entered, bits = bench.past(entered, f"entered_{k}"), bench.past(bits, f"bits_{k}")
        modes = bench.past(modes, f"modes_{k}")
    data, present, last = bits[: _WIDTH * _BITS], bits[_WIDTH * _BITS :][:_WIDTH], bits[_WIDTH * (_BITS + 1)]
    offset = bits[-2 * _BITS : -_BITS] ^ bits[-_BITS:] ^ modes[1].replicate(_BITS)  # that of the third unit is left
    elements = []
    for k in range(_WIDTH):
        code = data.word_select(k, _BITS)
        elements.append(Mux(modes[0], Mux(present[k], code ^ offset, 0), code))
    result = bench.probe("pipeline.core_o", shape.size)
    bench.prove("same_elements", ~entered | (result == Cat(*elements, last)))
    bench.cover("an_absent_element", entered & modes[0] & (present == 0b0110) & (offset == 0x1234) & (data[:16] != 0))
