"""torch's fused kernels as a lane, against the model."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from nearflash.abi.commands import CopyFormat
from nearflash.abi.rules import AdagradStep, AdamStep, LionStep, Profile, SgdStep, StateFormat
from nearflash.device.vector.fused import FusedLane
from nearflash.model.update.lane import optimizer_step

FUSED = dict(profile=Profile.TORCH_FUSED)
RULES = [
    AdamStep(1e-3, 7, weight_decay=0.1, **FUSED),
    AdamStep(3e-4, 1, beta1=0.8, weight_decay=0.1, decoupled=False, **FUSED),
    AdamStep(1e-3, 12_345, eps=0.0, **FUSED),
    SgdStep(0.1, 3, weight_decay=0.01, **FUSED),
    SgdStep(0.1, 1, momentum=0.9, dampening=0.5, **FUSED),
    SgdStep(0.1, 2, momentum=0.9, dampening=0.5, weight_decay=0.01, **FUSED),
    SgdStep(0.1, 2, momentum=0.9, nesterov=True, weight_decay=0.01, **FUSED),
    AdagradStep(0.1, 1, **FUSED),
    AdagradStep(0.1, 4, lr_decay=0.01, weight_decay=0.01, **FUSED),
]


def state(n: int, special: bool) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(n)
    values = (rng.standard_normal((4, n)) * 10.0 ** rng.uniform(-9, 3, (4, n))).astype(np.float32)
    values[3] = np.abs(values[3])
    if special:
        values[rng.integers(0, 4, 50), rng.integers(0, n, 50)] = rng.choice(np.float32([0, np.inf, np.nan, 1e-40]), 50)
    return dict(zip("gpmv", values, strict=True))


@pytest.mark.parametrize("copy", [CopyFormat.FP16, CopyFormat.BF16])
@pytest.mark.parametrize("n", [16, 4096, 5003])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_equals_the_model(rule, n, copy):
    """Bodies of 16 parameters by torch, a rest by the vector lane; NaN and subnormals as everywhere."""
    assert FusedLane.serves(rule)
    values = state(n, special=n > 1000)
    if isinstance(rule, SgdStep) and rule.step == 1:
        values["m"][:] = 0  # what the first step's m is
    inputs = {name: values[name] for name in ("g", "p", *rule.arrays)}
    expected = optimizer_step(rule, **inputs, copy=copy)
    outputs = {name: np.empty(n, np.float32) for name in ("p", *rule.arrays)} | {"copy": np.empty(n, np.uint16)}
    counts = FusedLane(rule, copy).step(inputs, outputs)
    for name, array in (expected.state | {"copy": expected.copy}).items():
        np.testing.assert_array_equal(outputs[name].view("u1"), array.view("u1"), name)
    assert counts == (expected.nonfinite_gradients, expected.copy_overflows)


def test_outputs_may_be_any_of_the_inputs():
    adam = RULES[0]
    values = state(64, special=False)
    expected = optimizer_step(adam, **values)
    outputs = {"p": values["g"], "m": values["v"], "v": values["p"]}
    FusedLane(adam, CopyFormat.NONE).step(values, outputs)
    for name, actual in outputs.items():
        np.testing.assert_array_equal(actual.view("u4"), expected.state[name].view("u4"), name)


def test_other_rules_are_not_served(monkeypatch):
    assert not FusedLane.serves(AdamStep(1e-3, 1))
    assert not FusedLane.serves(LionStep(1e-3, 1))
    assert not FusedLane.serves(AdamStep(1e-3, 1, state_format=StateFormat.BF16, **FUSED))
    monkeypatch.setattr("nearflash.device.vector.fused.find_spec", lambda name: None)
    assert not FusedLane.serves(RULES[0])


def test_a_thread_that_is_claimed_is_alone_and_others_are_not():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(FusedLane.claim_thread).result()
            assert pool.submit(torch.get_num_threads).result() == 1
            with ThreadPoolExecutor(1) as other:
                assert other.submit(torch.get_num_threads).result() == 2
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
