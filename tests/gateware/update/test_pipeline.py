"""The pipeline gives each group's results in order, under every stall pattern, and `last` with its group."""

from typing import Any

import numpy as np
import pytest
from amaranth import Module
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.adam import AdamStep, Profile
from nearflash.abi.commands import UpdateCommand
from nearflash.gateware.update.lane import PROGRAM
from nearflash.gateware.update.pipeline import UpdatePipeline, input_group, output_group
from nearflash.gateware.update.scalars import SCALARS, UpdateScalars
from nearflash.model.update.lane import adam_step
from nearflash.sim.stalls import STALLS
from nearflash.sim.streams import StreamUnit

LANES = 2
ADAM = AdamStep(lr=1e-3, step=3, weight_decay=0.01, profile=Profile.TORCH_FUSED)


class PipelineUnderTest(wiring.Component):
    """A pipeline whose scalars and program are constants."""

    i: In(stream.Signature(input_group(LANES)))
    o: Out(stream.Signature(output_group(LANES)))

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.pipeline = pipeline = UpdatePipeline(LANES)
        m.submodules.scalars = scalars = UpdateScalars()
        values = UpdateCommand(ADAM, 1, 0, 0, 0, 0, 0, 0, 0).registers()
        for name in (*SCALARS, "denominator_factor"):
            m.d.comb += getattr(scalars.i, name).eq(values[name])
        m.d.comb += [pipeline.scalars.eq(scalars.o), pipeline.program.eq(PROGRAM.from_bits(values["program"]))]
        wiring.connect(m, wiring.flipped(self.i), pipeline.i)
        wiring.connect(m, pipeline.o, wiring.flipped(self.o))
        return m


@pytest.fixture(scope="module")
def unit() -> StreamUnit:
    return StreamUnit(PipelineUnderTest(), "update-pipeline")


@pytest.mark.parametrize("stalls", STALLS)
def test_results_leave_in_order_with_last(unit: StreamUnit, stalls: Any) -> None:
    groups = 400
    rng = np.random.default_rng(1)
    state = np.abs(rng.standard_normal((groups * LANES, 4)).astype(np.float32))
    words = np.zeros((groups, 4 * LANES + 1), np.uint32)
    words[:, :-1] = state.view(np.uint32).reshape(groups, 4 * LANES)
    words[:, -1] = rng.integers(0, 2, groups)
    got = unit.run({"i": words}, {"o": groups}, stalls=stalls, seed=2)["o"]
    want = adam_step(ADAM, *(np.ascontiguousarray(column) for column in state.T))
    bits = np.unpackbits(np.ascontiguousarray(got).view(np.uint8), axis=1, bitorder="little")
    lane_bits = (output_group(LANES).size - 1) // LANES
    for lane in range(LANES):
        fields = bits[:, lane * lane_bits : lane * lane_bits + 96].reshape(groups, 3, 32)
        p, m, v = np.packbits(fields, axis=2, bitorder="little").view(np.uint32)[:, :, 0].T
        np.testing.assert_array_equal(p, want.p[lane::LANES].view(np.uint32))
        np.testing.assert_array_equal(m, want.m[lane::LANES].view(np.uint32))
        np.testing.assert_array_equal(v, want.v[lane::LANES].view(np.uint32))
    np.testing.assert_array_equal(bits[:, LANES * lane_bits], words[:, -1])
