"""The whole state as torch has it, out of the store and back into one."""

import copy

import numpy as np
import pytest
import torch

from nearflash.abi.errors import CommandError, ShapeError, StateError
from nearflash.training import NearStorageAdagrad, NearStorageAdamW, NearStorageLion, NearStorageSGD

OPTIONS = {"lr": 1e-2, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1}
KINDS = {
    "adamw": (NearStorageAdamW, torch.optim.AdamW, OPTIONS),
    "sgd": (NearStorageSGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    "adagrad": (NearStorageAdagrad, torch.optim.Adagrad, {"lr": 1e-2}),
}


def copies(tensors):
    return [torch.nn.Parameter(t.detach().clone()) for t in tensors]


def assert_same_state(one, other):
    assert one["param_groups"] == other["param_groups"] and set(one["state"]) == set(other["state"])
    for index, state in one["state"].items():
        assert set(state) == set(other["state"][index])
        assert all(torch.equal(state[name], other["state"][index][name]) for name in state)


@pytest.mark.parametrize("name", KINDS)
def test_torch_goes_on_from_it_and_back(tensors, set_gradients, tmp_path, name):
    """Two steps here, then torch takes over, then a new store takes torch's state: near torch alone all the way."""
    kind, torch_kind, options = KINDS[name]
    alone, mine = copies(tensors), copies(tensors)
    reference = torch_kind(alone, **options)
    for step in range(6):
        set_gradients(alone, step)
        reference.step()
    with kind(mine, path=tmp_path / "first", extent_params=1024, **options) as first:
        for step in (0, 1):
            set_gradients(mine, step)
            first.step()
        saved = copy.deepcopy(first.full_state_dict())
    theirs = torch_kind(mine, **options)
    theirs.load_state_dict(saved)
    if name == "sgd":  # which keeps no step of its own
        for state in theirs.state.values():
            state.pop("step", None)
    for step in (2, 3):
        set_gradients(mine, step)
        theirs.step()
    with kind(mine, path=tmp_path / "second", extent_params=2048, **options) as second:
        second.load_full_state_dict(theirs.state_dict())
        for step in (4, 5):
            set_gradients(mine, step)
            second.step()
    for one, other in zip(mine, alone, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("state_format", ["fp32", "bf16", "mx8"])
@pytest.mark.parametrize("kind", [NearStorageAdamW, NearStorageLion])
def test_round_trip(tensors, set_gradients, tmp_path, kind, state_format):
    """Out of one store, into another: the same, and the same from there on; of mx8 within its rounding."""
    mixed = [torch.nn.Parameter(t.detach().bfloat16()) if i % 2 else t for i, t in enumerate(tensors)]
    other = copies(mixed)
    common = {"param_dtype": "bf16", "state_format": state_format, "extent_params": 1024, "lr": 1e-3}
    with (
        kind(mixed, path=tmp_path / "one", **common) as one,
        kind(other, path=tmp_path / "other", overlap="backward", resident_bytes=1 << 20, **common) as two,
    ):
        for step in range(3):
            set_gradients(mixed, step, without=(2,))
            one.step()
        saved = one.full_state_dict()
        assert set(saved["state"][1]) >= {"step", "master", "exp_avg"} and 2 not in saved["state"]
        set_gradients(other, 7)
        two.step()
        with torch.no_grad():
            for tensor, trained in zip(other, mixed, strict=True):
                tensor.copy_(trained)
        two.load_full_state_dict(copy.deepcopy(saved))
        assert all(torch.equal(a, b) for a, b in zip(mixed, other, strict=True))
        assert [*two.store.tensor_steps] == [3, 3, 0, 3, 3]
        if state_format == "mx8":
            for index, state in saved["state"].items():
                for name, values in two.full_state_dict()["state"][index].items():
                    assert torch.allclose(values, state[name], rtol=0.1, atol=1e-6)
            return
        assert_same_state(two.full_state_dict(), saved)
        for each, parameters in ((one, mixed), (two, other)):
            set_gradients(parameters, 3)
            each.step()
        assert all(torch.equal(a, b) for a, b in zip(mixed, other, strict=True))


def test_what_does_not_fit_changes_nothing(tensors, set_gradients, open_optimizer):
    optimizer = open_optimizer(tensors)
    set_gradients(tensors, 0)
    optimizer.step()
    before = optimizer.full_state_dict()
    wrong = copy.deepcopy(before)
    wrong["state"][0]["exp_avg"] = torch.zeros(3)
    with pytest.raises(ShapeError, match=r"exp_avg of '0.0' must have the shape \(70, 30\), not \(3,\)"):
        optimizer.load_full_state_dict(wrong)
    sgd = torch.optim.SGD(copies(tensors), momentum=0.9)
    set_gradients(sgd.param_groups[0]["params"], 0)
    sgd.step()
    with pytest.raises(
        StateError, match=r"state must be of 5 tensors of this optimizer, not \['momentum_buffer'\] of 0"
    ):
        optimizer.load_full_state_dict(sgd.state_dict() | {"param_groups": before["param_groups"]})
    with pytest.raises(CommandError, match="a parameter group must have numbers for lr, betas, eps"):
        optimizer.load_full_state_dict(sgd.state_dict())
    assert optimizer.steps == 1
    assert_same_state(optimizer.full_state_dict(), before)


def test_momentum_of_torch_is_kept(tensors, set_gradients, tmp_path):
    """torch.optim.SGD's state has no step; it had counted as never updated, so that the momentum was dropped."""
    theirs = torch.optim.SGD(tensors, lr=1e-2, momentum=0.9)
    set_gradients(tensors, 0)
    theirs.step()
    assert "step" not in theirs.state_dict()["state"][0]
    mine = copies(tensors)
    with NearStorageSGD(mine, path=tmp_path / "state", lr=1e-2, momentum=0.9, extent_params=1024) as optimizer:
        optimizer.load_full_state_dict(theirs.state_dict())
        for step in (1, 2):
            for parameters, each in ((tensors, theirs), (mine, optimizer)):
                set_gradients(parameters, step)
                each.step()
    assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in zip(tensors, mine, strict=True))


def test_a_step_that_is_needed_and_missing(tensors, set_gradients, open_optimizer):
    optimizer = open_optimizer(tensors)
    theirs = torch.optim.AdamW(copies(tensors))
    set_gradients(theirs.param_groups[0]["params"], 0)
    theirs.step()
    saved = theirs.state_dict()
    del saved["state"][1]["step"]
    with pytest.raises(StateError, match=r"state of '0.1' must have a step beside exp_avg, exp_avg_sq"):
        optimizer.load_full_state_dict(saved)
    assert optimizer.steps == 0


def test_initial_sums_outlive_a_late_write(tensors, tmp_path):
    """torch's AdaGrad has its sums from the start, at step 0; a tensor that was then written began them anew."""
    theirs = torch.optim.Adagrad(copies(tensors), lr=1e-2, initial_accumulator_value=0.5)
    with NearStorageAdagrad(tensors, path=tmp_path / "state", lr=1e-2, extent_params=1024) as optimizer:
        optimizer.load_full_state_dict(theirs.state_dict())
        with torch.no_grad():
            tensors[0].mul_(2)
        with pytest.raises(StateError, match=r"parameter '0.0' must be changed by this optimizer only"):
            optimizer.step()
        assert (optimizer.store.read_array("v") == 0.5).any()


def test_stored_arrays_hold_what_is_shown(tensors, set_gradients, open_optimizer):
    optimizer = open_optimizer(tensors)
    set_gradients(tensors, 0)
    optimizer.step()
    state = optimizer.full_state_dict()["state"]
    for array, name in (("m", "exp_avg"), ("v", "exp_avg_sq")):
        stored = optimizer.store.read_array(array)
        for index, entry in enumerate(optimizer.store.manifest.tensors):
            if index in state:
                inside = stored[entry.start : entry.start + entry.params]
                assert np.array_equal(state[index][name].reshape(-1).numpy(), inside)
