"""The pipeline gives each group's results in order, under every stall pattern, and `last` with its group."""

from typing import Any

import numpy as np
import pytest
from amaranth import Module
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.kernel.commands import UpdateCommand
from nearflash.abi.optimizers import AdamStep, Profile
from nearflash.gateware.update.lane import PROGRAM
from nearflash.gateware.update.pipeline import UpdatePipeline, input_group, output_group
from nearflash.gateware.update.scalars import SCALARS, UpdateScalars
from nearflash.model.update.lane import optimizer_step
from nearflash.sim.pysim.harness import measure_latency, run_streams
from nearflash.sim.stalls import STALLS

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
        values = UpdateCommand(ADAM, 1, {}, {}).registers()
        for name in (*SCALARS, "denominator_factor"):
            m.d.comb += getattr(scalars.i, name).eq(values[name])
        m.d.comb += [pipeline.scalars.eq(scalars.o), pipeline.program.eq(PROGRAM.from_bits(values["program"]))]
        wiring.connect(m, wiring.flipped(self.i), pipeline.i)
        wiring.connect(m, pipeline.o, wiring.flipped(self.o))
        return m


# Without stalls: the latency below, and the lane's own tests.
@pytest.mark.parametrize(
    "stalls", [pytest.param(stalls, marks=pytest.mark.full) if stalls == "none" else stalls for stalls in STALLS]
)
def test_results_leave_in_order_with_last(stalls: Any) -> None:
    groups = 40
    rng = np.random.default_rng(1)
    state = np.abs(rng.standard_normal((groups * LANES, 4)).astype(np.float32))
    lasts = rng.integers(0, 2, groups).tolist()
    words = [dict(zip("gpmv", row, strict=True)) for row in state.view(np.uint32).tolist()]
    items = [{"lanes": words[LANES * k : LANES * (k + 1)], "last": last} for k, last in enumerate(lasts)]
    got = run_streams(PipelineUnderTest(), {"i": items}, {"o": groups}, stalls=stalls, seed=2)["o"]
    want = optimizer_step(ADAM, *(np.ascontiguousarray(column) for column in state.T))
    for name in ("p", "m", "v"):
        seen = [int(lane[name]) for group in got for lane in group.lanes]
        assert seen == getattr(want, name).view(np.uint32).tolist(), name
    assert [int(group.last) for group in got] == lasts


def test_latency_is_as_stated() -> None:
    pipeline = UpdatePipeline(LANES)
    pipeline._MustUse__silence = True
    assert measure_latency(PipelineUnderTest(), {"i": [0]}) == pipeline.LATENCY
