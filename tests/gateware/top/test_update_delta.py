"""What the copy changes, in its place: the update kernel on Verilator against the model."""

from dataclasses import replace

import numpy as np
import pytest

from nearflash.abi.errors import CommandError
from nearflash.abi.kernel.commands import CopyFormat
from nearflash.abi.kernel.config import update_config
from nearflash.abi.optimizers import AdamStep, LionStep
from nearflash.device import open_device
from nearflash.device.backends.model.update import ModelDevice
from nearflash.device.selftest.update import UpdateVector, differing_words, random_state, run_update
from nearflash.gateware.update.lane import Lane
from nearflash.sim.verilator.device import VerilatorDevice
from nearflash.sim.verilator.kernel import MemoryModel

TINY, WIDE = update_config("update-tiny-delta"), update_config("update-smartssd-delta")
ADAM = AdamStep(lr=1e-5, step=4, weight_decay=0.01)


@pytest.fixture(scope="module", params=[TINY, WIDE], ids=lambda c: c.full_name)
def device(request):
    """Of ports of one word of a delta, and of eight."""
    model = MemoryModel(read_latency_cycles=60, write_latency_cycles=40)
    with VerilatorDevice(request.param, memory_bytes=1 << 22, model=model) as device:
        yield device


@pytest.mark.full
@pytest.mark.parametrize("rule", [ADAM, replace(ADAM, lr=1e-2), LionStep(lr=1e-6, step=2)], ids=str)
@pytest.mark.parametrize(
    ("params", "copy", "in_place"),
    [(1, CopyFormat.BF16, False), (4097, CopyFormat.FP16, True), (20_000, CopyFormat.BF16, True)],
)
def test_equals_the_model_to_the_bit(device, rule, params, copy, in_place):
    """The delta and the state; counters, too, the beats of the delta's words among them."""
    case = UpdateVector(rule, params, copy, in_place, delta=True)
    state = random_state(np.random.default_rng(params), params)
    state[1] *= np.random.default_rng(1).choice([1e-3, 1, 1e3], params)
    state[1, ::71] = np.nan
    results, counters = run_update(device, case, state)
    config = device.identity.config
    with ModelDevice(config) as model:
        expected, counted = run_update(model, case, state)
    assert differing_words(results, expected)[1] == 0
    assert {name: counters[name] for name in counted} == counted
    lane = Lane()
    lane._MustUse__silence = True
    # A word of the delta takes a cycle for its checksum and one to go out: more than a group where tiles are dense.
    words = len(results["copy"]) // 8
    assert counters["cycles"] <= max(params // config.lanes, 2 * words) + 2 * 2048 + lane.LATENCY + 300


@pytest.mark.full
def test_whole_copies_come_between_deltas(device):
    """The packer's part of the writer is as it was."""
    state = random_state(np.random.default_rng(5), 5000)
    with ModelDevice(device.identity.config) as model:
        for delta, copy in ((True, CopyFormat.BF16), (False, CopyFormat.BF16), (False, CopyFormat.NONE), (True, 1)):
            case = UpdateVector(ADAM, 5000, CopyFormat(copy), delta=delta)
            results, expected = (run_update(each, case, state)[0] for each in (device, model))
            assert differing_words(results, expected)[1] == 0


@pytest.mark.parametrize("spec", ["verilator:update-tiny", "hls:update-tiny"])
def test_devices_without_deltas_refuse_them(spec):
    case, state = UpdateVector(ADAM, 64, CopyFormat.BF16, delta=True), random_state(np.random.default_rng(0), 64)
    with open_device(spec) as device, pytest.raises(CommandError, match="delta must be False on update-tiny"):
        run_update(device, case, state)
