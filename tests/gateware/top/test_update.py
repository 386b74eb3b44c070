"""The whole kernel on Verilator: against cocotb's AXI models, and at full rate."""

import numpy as np
import pytest

from nearflash.abi.kernel.commands import CopyFormat
from nearflash.abi.kernel.config import update_config
from nearflash.abi.optimizers import AdamStep
from nearflash.device.selftest.update import UpdateVector, random_state, run_update
from nearflash.gateware.update.lane import Lane
from nearflash.model.update.lane import optimizer_step
from nearflash.sim.verilator.device import VerilatorDevice
from nearflash.sim.verilator.kernel import MemoryModel
from nearflash.verify.cocotb.run import run_testbench

ADAM = AdamStep(lr=1e-3, step=4, weight_decay=0.01)
MODEL = MemoryModel(read_latency_cycles=60, write_latency_cycles=40)


@pytest.mark.full  # a simulator of its own, two minutes to build and to run
def test_testbench() -> None:
    result = run_testbench("gateware.top.update")
    assert result.failed == ()
    assert len(result.passed) == 3


def test_one_parameter_a_cycle_a_lane_and_a_long_command_does_not_hang() -> None:
    """A command much longer than all queues; the store side was once commanded too late for it."""
    params = 20_000
    lane = Lane()
    lane._MustUse__silence = True
    state = random_state(np.random.default_rng(1), params)
    with VerilatorDevice(update_config("update-tiny"), memory_bytes=1 << 22, model=MODEL) as device:
        results, counters = run_update(device, UpdateVector(ADAM, params, CopyFormat.FP16), state)
    assert counters["cycles"] <= params + lane.LATENCY + 300
    assert counters["params_done"] == params
    assert (counters["read_beats"], counters["write_beats"]) == (4 * params // 2, 3 * params // 2 + params // 4)
    want = optimizer_step(ADAM, *state, CopyFormat.FP16)
    assert results["p"] == want.p.tobytes()


@pytest.mark.full
def test_four_lanes_equal_the_model() -> None:
    state = random_state(np.random.default_rng(2), 100_003)
    with VerilatorDevice(update_config("update-smartssd"), memory_bytes=1 << 24, model=MODEL) as device:
        results, counters = run_update(device, UpdateVector(ADAM, 100_003, CopyFormat.BF16), state)
    assert counters["cycles"] <= 0.26 * 100_003
    want = optimizer_step(ADAM, *state, CopyFormat.BF16)
    for name in ("p", "m", "v", "copy"):
        assert results[name] == getattr(want, name).tobytes(), name
