"""The dequantizer: a proof for beats of four elements; vectors of rows in any mode.

In the proof, short units stand in for those of the datapath. They add without carry, so that a result is a code's only
with the scale and the minimum that belong to it. The real units are free-running as these are, and tests compare them
with the model. The vectors' scales and minima have sums that cancel, round or overflow.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from numpy.typing import NDArray

from nearflash.abi.bitmap import SCALE_COLUMNS, ElementFormat
from nearflash.abi.formats import NumberFormat
from nearflash.gateware.fp.pipeline import delay
from nearflash.gateware.weights.dequantize import Dequantizer
from nearflash.model.fp.convert import from_narrow, to_bf16, to_fp16
from nearflash.model.weights.dequantize import dequantize
from nearflash.sim.verilator.ports import words_from_integers
from nearflash.verify.mutants.observed import gate
from nearflash.verify.mutants.target import Target
from nearflash.verify.proofs.harness import ProofHarness
from nearflash.verify.proofs.proof import Proof
from nearflash.verify.proofs.properties import accept, check_source, moves, offer

__all__ = ["PROOF", "TARGET", "ObservedDequantizer", "ShortDequantizer", "build_proof", "vectors"]

_PROOF_WIDTH, _PROOF_BITS = 4, 16
_PROOF_GROUP_BEATS = SCALE_COLUMNS // _PROOF_WIDTH


class _Sum(wiring.Component):
    """The inputs without carry, `latency` cycles later."""

    def __init__(self, latency: int, *inputs: str) -> None:
        self.LATENCY, self._names = latency, inputs
        super().__init__({name: In(_PROOF_BITS) for name in inputs} | {"bf16": In(1), "o": Out(_PROOF_BITS)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        total = self.bf16.replicate(_PROOF_BITS)
        for name in self._names:
            total ^= getattr(self, name)
        m.d.comb += self.o.eq(delay(m, total, self.LATENCY))
        return m


class ShortDequantizer(Dequantizer):
    """Dequantizer with the units that stand in: a cycle to where code and scale meet, one to where the minimum does."""

    _UNITS = (lambda: _Sum(1, "i"), lambda: _Sum(1, "code", "scale"), lambda: _Sum(0, "a", "b"), lambda: _Sum(0, "i"))


def build_proof(dut: Any = None) -> ProofHarness:
    """A beat for a beat, in order, each with its group's scale; an item of scales for each group.

    The solver marks any beat, and that one is followed by its `last`; that the elements of a beat stay with it is the
    credit pipeline's (proof stream.credit), whose datapath gives here what its beat and its scale come to.
    """
    dut = ShortDequantizer(_PROOF_WIDTH) if dut is None else dut
    harness = ProofHarness(dut)
    m, capacity = harness.m, dut.LATENCY + 1
    offer(harness, dut.i)
    offer(harness, dut.i_scale, "i_scale")
    accept(harness, dut.o)
    check_source(harness, SimpleNamespace(valid=dut.o.valid, ready=dut.o.ready, payload=dut.o.payload.last))
    scaled, bf16, beat = harness.free(1, "scaled"), harness.free(1, "bf16"), dut.i.payload
    m.d.comb += [dut.scaled.eq(scaled), dut.bf16.eq(bf16)]

    inside, place = Signal(range(capacity + 2)), Signal(range(_PROOF_GROUP_BEATS))
    enters, leaves = moves(dut.i), moves(dut.o)
    ends = beat.last | (place == _PROOF_GROUP_BEATS - 1)
    m.d.sync += inside.eq(inside + enters - leaves)
    with m.If(enters):
        m.d.sync += place.eq(Mux(ends, 0, place + 1))
    modes = Cat(scaled, bf16)
    harness.assume(((inside == 0) & (place == 0)) | (modes == harness.past(modes, "modes_past")))

    marked, tracked, ahead, last = Signal(), Signal(), Signal(range(capacity + 2)), Signal()
    mark = enters & ~marked & harness.free(1, "mark")
    m.d.sync += marked.eq(marked | mark)
    with m.If(mark):
        m.d.sync += [tracked.eq(1), ahead.eq(inside - leaves), last.eq(beat.last)]
    with m.Elif(tracked & leaves):
        m.d.sync += [tracked.eq(ahead != 0), ahead.eq(Mux(ahead == 0, 0, ahead - 1))]
    due = tracked & (ahead == 0)
    able = dut.i_scale.valid | ~scaled
    harness.prove("nothing_invented", ~dut.o.valid | (inside != 0))
    harness.prove("capacity_kept", inside <= capacity)
    harness.prove("same_last", ~(dut.o.valid & due) | (dut.o.payload.last == last))
    harness.prove("a_beat_with_its_scale", ~(enters & scaled) | dut.i_scale.valid)
    harness.prove("a_scale_for_each_group", moves(dut.i_scale) == (enters & scaled & ends))
    harness.prove("no_scale_unless_scaled", scaled | ~dut.i_scale.ready)
    harness.prove("takes_a_beat_when_there_is_room", dut.i.ready == (able & (inside != capacity)))
    harness.prove("empty_after_reset", ~harness.was_reset | ~dut.o.valid)
    harness.no_paths += [(dut.o.ready, dut.i.ready), (dut.i.valid, dut.o.valid), (dut.i.valid, dut.i.ready)]
    harness.cover("full", inside == capacity)
    harness.cover("a_second_group", moves(dut.i_scale) & ~beat.last & (place != 0) & (inside > 1))
    harness.cover("a_row_leaves", leaves & due & last)
    _datapath(harness, dut, enters)
    return harness


def _datapath(harness: ProofHarness, dut: Any, enters: Any) -> None:
    """Assert that the queue gets the sum of a beat's codes, of its scale and minimum, where an element is present."""
    beat, scale, shape = dut.i.payload, dut.i_scale.payload, dut.o.payload.shape()
    cycles = dut.LATENCY - 1
    entered, bits = enters, Cat(beat.as_value(), scale.scale, scale.minimum)
    modes = Cat(dut.scaled, dut.bf16)
    for k in range(cycles):
        entered, bits = harness.past(entered, f"entered_{k}"), harness.past(bits, f"bits_{k}")
        modes = harness.past(modes, f"modes_{k}")
    data, present, last = (
        bits[: _PROOF_WIDTH * _PROOF_BITS],
        bits[_PROOF_WIDTH * _PROOF_BITS :][:_PROOF_WIDTH],
        bits[_PROOF_WIDTH * (_PROOF_BITS + 1)],
    )
    offset = (
        bits[-2 * _PROOF_BITS : -_PROOF_BITS] ^ bits[-_PROOF_BITS:] ^ modes[1].replicate(_PROOF_BITS)
    )  # that of the third unit is left
    elements = []
    for k in range(_PROOF_WIDTH):
        code = data.word_select(k, _PROOF_BITS)
        elements.append(Mux(modes[0], Mux(present[k], code ^ offset, 0), code))
    result = harness.probe("pipeline.core_o", shape.size)
    harness.prove("same_elements", ~entered | (result == Cat(*elements, last)))
    harness.cover("an_absent_element", entered & modes[0] & (present == 0b0110) & (offset == 0x1234) & (data[:16] != 0))


_WIDTH, _BITS = 4, 16
_GROUP_BEATS = SCALE_COLUMNS // _WIDTH
_RUNS, _ROWS = 8, 40
_RUN = data.StructLayout({"scaled": 1, "bf16": 1, "beats": 16})


class ObservedDequantizer(wiring.Component):
    """Dequantizer as `inner`; `i_run` has the modes for so many beats, which leave it before the next ones enter."""

    def __init__(self) -> None:
        self.inner = Dequantizer(_WIDTH)
        streams = {name: self.inner.signature.members[name] for name in ("i", "i_scale", "o")}
        super().__init__({"i_run": In(stream.Signature(_RUN)), **streams})

    def elaborate(self, platform: Any) -> Module:
        """Build it with the gates."""
        m = Module()
        m.submodules.inner = inner = self.inner
        run, outside, inside = Signal(_RUN), Signal(16), Signal(16)  # beats to enter, to leave
        shown = stream.Signature(inner.o.payload.shape()).create()
        gate(m, inner.o, shown)
        wiring.connect(m, shown, wiring.flipped(self.o))
        wiring.connect(m, wiring.flipped(self.i_scale), inner.i_scale)
        m.d.comb += [
            inner.scaled.eq(run.scaled),
            inner.bf16.eq(run.bf16),
            inner.i.payload.eq(self.i.payload),
            inner.i.valid.eq(self.i.valid & (outside != 0)),
            self.i.ready.eq(inner.i.ready & (outside != 0)),
            self.i_run.ready.eq(inside == 0),
        ]
        m.d.sync += [
            outside.eq(outside - (inner.i.valid & inner.i.ready)),
            inside.eq(inside - (self.o.valid & self.o.ready)),
        ]
        with m.If(self.i_run.valid & self.i_run.ready):
            beats = self.i_run.payload.beats
            m.d.sync += [run.eq(self.i_run.payload), outside.eq(beats), inside.eq(beats)]
        return m


def vectors(rng: np.random.Generator) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Make vectors: the upper bits of codes are anything; scales are there for those runs alone that take them."""
    runs, beats, scales, results = [], list[int](), [], list[int]()
    for _ in range(_RUNS):
        scaled, output = int(rng.integers(4) > 0), ElementFormat.BF16 if rng.integers(2) else ElementFormat.FP16
        sizes = rng.choice([1, 2, 3, 16, 17, 33], _ROWS, p=[0.6, 0.2, 0.08, 0.04, 0.04, 0.04])
        group = np.concatenate([4 * row + np.arange(size) // _GROUP_BEATS for row, size in enumerate(sizes)])
        group = np.unique(group, return_inverse=True)[1]
        last = np.isin(np.arange(group.size), np.cumsum(sizes) - 1)
        elements = rng.integers(0, 1 << _BITS, (group.size, _WIDTH), np.uint16)
        powers = (1 << rng.integers(0, 8, elements.shape)) - rng.integers(0, 2, elements.shape)
        simple = (elements & 0xFF00 | powers).astype(np.uint16)
        elements = np.where(rng.integers(2, size=elements.shape), elements, simple)
        present = rng.random(elements.shape) < 0.8
        pairs = _scales(rng, elements[np.unique(group, return_index=True)[1], 0].astype(np.uint8), output)
        found = elements
        if scaled:
            scale, minimum = pairs[group].T[..., None]
            found = dequantize(elements.astype(np.uint8), present, scale, minimum, output)
            scales.append(pairs[:, 0] | pairs[:, 1].astype(np.uint32) << _BITS)
        runs.append(scaled | (output is ElementFormat.BF16) << 1 | group.size << 2)
        beats += _join((elements, _BITS), (present, 1), (last[:, None], 1))
        results += _join((found, _BITS), (last[:, None], 1))
    data_bits = _WIDTH * _BITS
    inputs: dict[str, NDArray[Any]] = {
        "i_run": np.array(runs, np.uint32),
        "i": words_from_integers(beats, data_bits + _WIDTH + 1),
        "i_scale": np.concatenate([np.zeros(0, np.uint32), *scales]),
    }
    return inputs, {"o": words_from_integers(results, data_bits + 1)}


def _scales(rng: np.random.Generator, codes: NDArray[np.uint8], output: ElementFormat) -> NDArray[np.uint16]:
    """Scale and minimum a group: any; special; near one another; or such that a code's sum is close to zero.

    Half of the numbers have one bit or a run of ones behind the first: sums that are ties, or just are not.
    """
    number, kind = output.number_format, rng.integers(0, 8, codes.size)[:, None]
    pairs = rng.integers(0, 1 << _BITS, (codes.size, 2), np.uint16)
    top, sparse = (1 << number.exponent_bits) - 1, np.uint16(1) << rng.integers(0, number.mantissa_bits, pairs.shape)
    sparse = np.where(rng.integers(2, size=pairs.shape), sparse, -sparse) & ((1 << number.mantissa_bits) - 1)
    fewer = pairs & ~np.uint16((1 << number.mantissa_bits) - 1) | sparse.astype(np.uint16)
    pairs = np.where(rng.integers(2, size=pairs.shape), pairs, fewer)
    pairs = np.where(kind == 0, _with_exponents(pairs, number, rng.choice([0, 1, top - 1, top], pairs.shape)), pairs)
    near = (pairs[:, :1] >> number.mantissa_bits & top) + rng.integers(-14, 22, (codes.size, 1))
    moved = np.concatenate([pairs[:, :1], _with_exponents(pairs[:, 1:], number, near.clip(0, top))], axis=1)
    pairs = np.where(kind >= 3, moved, pairs)
    with np.errstate(all="ignore"):
        product = codes.astype(np.float32) * from_narrow(pairs[:, 0], number).view(np.float32)
    opposite = (to_fp16 if output is ElementFormat.FP16 else to_bf16)(product) ^ np.uint16(1 << 15)
    cancelled = np.stack([pairs[:, 0], opposite ^ rng.integers(0, 2, codes.size, np.uint16)], axis=1)
    return np.where(kind == 1, cancelled, pairs).astype(np.uint16)


def _with_exponents(patterns: NDArray[Any], number: NumberFormat, fields: NDArray[Any]) -> NDArray[np.uint16]:
    mask = np.uint16(((1 << number.exponent_bits) - 1) << number.mantissa_bits)
    return patterns & ~mask | (fields << number.mantissa_bits).astype(np.uint16)


def _join(*columns: tuple[NDArray[Any], int]) -> list[int]:
    """Rows of fields of so many bits, the first one lowest."""
    numbers = [0] * len(columns[0][0])
    at = 0
    for fields, bits in columns:
        for row in fields.T.tolist():
            numbers = [number | int(field) << at for number, field in zip(numbers, row, strict=True)]
            at += bits
    return numbers


PROOF = Proof(build_proof)
TARGET = Target(ObservedDequantizer, vectors, part="inner", stalls=("none", "both"), batches=40, cut_cycles=(9, 20, 33))
