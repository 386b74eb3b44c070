"""Split masters in the HLS kernels, against the model, to the bit."""

import numpy as np
import pytest

from nearflash.abi.optimizers import AdamStep, LionStep, MasterFormat, SgdStep
from nearflash.device.backends.model.update import ModelDevice
from nearflash.device.selftest.update import UpdateVector, differing_words, random_state, run_update
from nearflash.sim.hls.device import HlsDevice

RULES = {"adam": (AdamStep(1e-3, 4, weight_decay=0.01), None), "sgd": (SgdStep(0.1, 3), None),
         "lion-topk": (LionStep(1e-3, 2), 0.05)}  # fmt: skip


@pytest.mark.parametrize("build", ["update-tiny-split", "update-smartssd-split"])
@pytest.mark.parametrize("params", [1, 9, 4097])
@pytest.mark.parametrize("name", ["adam", "lion-topk", pytest.param("sgd", marks=pytest.mark.full)])
def test_both_halves_are_the_models(build, name, params):
    """Of masters of any class: infinite ones, NaN, ties, and finite ones whose weight is infinite."""
    rule, density = RULES[name]
    case = UpdateVector(rule, params, density=density, master=MasterFormat.SPLIT, in_place=params > 1)
    state, rng = random_state(np.random.default_rng(params), params), np.random.default_rng(1)
    words = rng.integers(0, 1 << 32, params, np.uint32)
    words[::3] = words[::3] & 0xFFFF | rng.choice([0, 0x7F80, 0xFF80, 0x7F7F, 1, 0x3F80], words[::3].size) << 16
    words[::5] = words[::5] & 0xFFFF0000 | rng.choice([0x8000, 0x7FFF, 0, 0xFFFF], words[::5].size)
    state[1, 1:] = words.view(np.float32)[1:]
    with HlsDevice.open(build) as device, ModelDevice(device.identity.config) as model:
        results, counters = run_update(device, case, state)
        expected, counted = run_update(model, case, state)
    assert differing_words(results, expected)[1] == 0
    assert {name: counters[name] for name in counted} == counted
    assert params < 4097 or counters["copy_overflows"] > 0
