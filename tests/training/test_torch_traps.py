"""What real training code does to an optimizer: accelerate, GradScaler, distributed checkpoints, clipping by hand."""

import copy

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from nearflash.abi.errors import CommandError, StateError
from nearflash.training import NearStorageAdagrad, NearStorageAdam, NearStorageAdamW, NearStorageSGD


def model_of(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(20, 70), torch.nn.Tanh(), torch.nn.Linear(70, 3))


def backward(model, step, scale=1.0):
    x = torch.randn(8, 20, generator=torch.Generator().manual_seed(step))
    (model(x).square().mean() * scale).backward()


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def trained(open_optimizer, path, steps=3, **options):
    model = model_of()
    optimizer = open_optimizer(model.parameters(), path=path, **options)
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    return model


@pytest.fixture
def quiet_scaler(recwarn):
    """A GradScaler on CPU, as bf16 scripts have it."""
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)


# accelerate


def test_accelerate_prepares_and_steps(open_optimizer, tmp_path):
    """At construction it calls state_dict, moves every tensor of it, and load_state_dict."""
    accelerate = pytest.importorskip("accelerate")
    model = model_of()
    accelerator = accelerate.Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(model, open_optimizer(model.parameters()))
    for step in range(3):
        optimizer.zero_grad()
        accelerator.backward(
            prepared(torch.randn(8, 20, generator=torch.Generator().manual_seed(step))).square().mean()
        )
        optimizer.step()
        assert not optimizer.step_was_skipped
    assert optimizer.optimizer.steps == 3
    assert same(model, trained(open_optimizer, tmp_path / "other"))


def test_a_step_that_is_patched_tells_skips(open_optimizer, quiet_scaler):
    """accelerate replaces `step` of the object to see whether a GradScaler called it."""
    model = model_of()
    optimizer = open_optimizer(model.parameters())
    called, real = [], optimizer.step
    optimizer.step = lambda *args, **kwargs: called.append(1) or real(*args, **kwargs)
    backward(model, 0, scale=1024.0)
    quiet_scaler.scale(torch.tensor(1.0))
    quiet_scaler.step(optimizer)
    assert called == [1] and optimizer.steps == 1


# GradScaler


@pytest.mark.parametrize("by_hand", [False, True])
def test_grad_scaler_changes_no_bit(open_optimizer, tmp_path, quiet_scaler, by_hand):
    """Scales are powers of two; whether the scaler unscales the gradients or `step` does is the same."""
    model = model_of()
    optimizer = open_optimizer(model.parameters(), max_grad_norm=0.05)
    for step in range(5):
        optimizer.zero_grad()
        backward(model, step, scale=quiet_scaler.get_scale() if step else 1024.0)
        quiet_scaler.scale(torch.tensor(1.0))
        gradients = [p.grad.clone() for p in model.parameters()]
        if by_hand:
            quiet_scaler.unscale_(optimizer)
        quiet_scaler.step(optimizer)
        assert by_hand or all(torch.equal(g, p.grad) for g, p in zip(gradients, model.parameters(), strict=True))
        quiet_scaler.update()
    assert optimizer.steps == 5 and quiet_scaler.get_scale() == 4096.0
    assert same(model, trained(open_optimizer, tmp_path / "other", steps=5, max_grad_norm=0.05))


@pytest.mark.parametrize("overlap", ["step", "backward"])
def test_grad_scaler_skips_change_nothing(open_optimizer, quiet_scaler, overlap):
    model = model_of()
    optimizer = open_optimizer(model.parameters(), overlap=overlap)
    quiet_scaler.scale(torch.tensor(1.0))
    before = copy.deepcopy(model)
    backward(model, 0, scale=float("inf"))
    quiet_scaler.step(optimizer)
    quiet_scaler.update()
    assert quiet_scaler.get_scale() == 512.0
    assert optimizer.steps == 0 and same(model, before)
    assert set(optimizer.store.tensor_steps) == {0}


def test_two_loss_scales_are_refused(open_optimizer, quiet_scaler):
    model = model_of()
    optimizer = open_optimizer(model.parameters(), loss_scale=8.0)
    quiet_scaler.scale(torch.tensor(1.0))
    backward(model, 0)
    with pytest.raises(CommandError, match="loss_scale must be None where a GradScaler scales the loss"):
        quiet_scaler.step(optimizer)
    assert optimizer.steps == 0


# Distributed checkpoints


def test_distributed_checkpoint_takes_the_handles(open_optimizer):
    """By parameter names, nested or flat; back into the same optimizer, and not into another one's."""
    model = model_of()
    optimizer = open_optimizer(model.parameters(), lr=0.25)
    backward(model, 0)
    optimizer.step()
    saved = get_optimizer_state_dict(model, optimizer)
    assert set(saved["state"]) == {name for name, _ in model.named_parameters()}
    assert saved["state"]["0.weight"]["step"] == 1 and optimizer.steps == 1, "asking for it is no step"
    optimizer.param_groups[0]["lr"] = 1.0
    set_optimizer_state_dict(model, optimizer, saved)
    assert optimizer.param_groups[0]["lr"] == 0.25 and optimizer.steps == 1
    saved["state"]["0.weight"]["nearflash_step"] = 9
    with pytest.raises(StateError, match=r"state_dict must be of step 1 as in .*, not 9"):
        set_optimizer_state_dict(model, optimizer, saved)


@pytest.mark.parametrize("overlap", ["step", "backward"])
def test_a_step_with_zero_lr_creates_state_as_torch_does(open_optimizer, overlap):
    """torch.distributed.checkpoint makes one, with zero gradients: parameters stay, to the bit."""
    model, theirs = model_of(), model_of()
    optimizer = open_optimizer(model.parameters(), lr=0.5, weight_decay=0.1, overlap=overlap)
    torch_optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.5, weight_decay=0.1)
    for each, parameters in ((optimizer, model.parameters()), (torch_optimizer, theirs.parameters())):
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        each.param_groups[0]["lr"] = torch.tensor(0.0) if each is optimizer else 0.0
        each.step()
        each.param_groups[0]["lr"] = 0.5
        each.zero_grad()
    assert same(model, model_of()) and same(theirs, model_of())
    state = optimizer.full_state_dict()["state"]
    for index, parameter in enumerate(theirs.parameters()):
        expected = torch_optimizer.state[parameter]
        assert set(state[index]) == set(expected)
        assert all(torch.equal(state[index][name], expected[name]) for name in expected)


# Clipping, groups, frozen tensors


@pytest.mark.parametrize("overlap", ["step", "backward"])
def test_clipping_by_hand_has_its_effect(open_optimizer, tmp_path, overlap):
    """As transformers' Trainer does it, through p.grad; the optimizer's own argument is the same to rounding."""
    model = model_of()
    optimizer = open_optimizer(model.parameters(), overlap=overlap)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
    own = trained(open_optimizer, tmp_path / "own", max_grad_norm=0.01)
    without = trained(open_optimizer, tmp_path / "without")
    for mine, other, third in zip(model.parameters(), own.parameters(), without.parameters(), strict=True):
        assert torch.allclose(mine, other, rtol=1e-5, atol=1e-7) and not torch.equal(mine, third)


@pytest.mark.parametrize("overlap", ["step", "backward"])
def test_frozen_tied_and_thawed_tensors(open_optimizer, tmp_path, overlap):
    """A tied weight is updated once; a frozen one not at all, until it is thawed."""
    model, theirs = model_of(), model_of()
    for each in (model, theirs):
        each.append(torch.nn.Linear(3, 3))
        torch.nn.init.eye_(each[3].weight)
        each[3].bias = each[2].bias
        each[0].weight.requires_grad_(False)
    optimizer = open_optimizer(model.parameters(), overlap=overlap)
    torch_optimizer = torch.optim.AdamW(theirs.parameters())
    for step in range(4):
        for each, one in ((optimizer, model), (torch_optimizer, theirs)):
            one[0].weight.requires_grad_(step >= 2)
            each.zero_grad()
            backward(one, step)
            each.step()
    steps = dict(
        zip(
            (t.name for t in optimizer.store.manifest.tensors),
            optimizer.store.tensor_steps,
            strict=True,
        )
    )
    assert sorted(steps.values()) == [2, 4, 4, 4, 4]
    for mine, other in zip(model.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(mine, other, rtol=1e-5, atol=1e-6)


def test_groups_added_before_the_first_step_overlap_too(open_optimizer):
    model = model_of()
    optimizer = open_optimizer(model[0].parameters(), overlap="backward")
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.5})
    backward(model, 0)
    optimizer._worker(lambda: None)  # after what the hooks have left to do
    speculative = optimizer._runner.speculator._speculative
    assert len(speculative.seen) == 4
    optimizer.step()
    assert optimizer.report.mispredictions == 0 and set(optimizer.store.tensor_steps) == {1}


def test_gradients_set_to_zero_still_decay_the_moments(open_optimizer):
    model, theirs = model_of(), model_of()
    optimizer, torch_optimizer = open_optimizer(model.parameters()), torch.optim.AdamW(theirs.parameters())
    for step in range(3):
        for each, one in ((optimizer, model), (torch_optimizer, theirs)):
            each.zero_grad(set_to_none=False)
            if step != 1:
                backward(one, step)
            each.step()
    assert optimizer.steps == 3
    for mine, other in zip(model.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(mine, other, rtol=1e-5, atol=1e-6)


def test_one_cycle_moves_lr_and_betas(open_optimizer):
    model, theirs = model_of(), model_of()
    for one, each in ((model, open_optimizer(model.parameters())), (theirs, torch.optim.AdamW(theirs.parameters()))):
        schedule = torch.optim.lr_scheduler.OneCycleLR(each, max_lr=0.1, total_steps=10)
        for step in range(9):
            each.zero_grad()
            backward(one, step)
            each.step()
            schedule.step()
        assert each.param_groups[0]["betas"][0] != 0.9
    for mine, other in zip(model.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(mine, other, rtol=1e-4, atol=1e-5)


# Arguments


def test_torch_arguments_by_position_and_those_without_meaning(tmp_path):
    model = model_of()
    with NearStorageAdamW(
        model.parameters(), 1e-4, (0.8, 0.9), 1e-7, 0.0, False, path=tmp_path / "a", foreach=True, fused=None
    ) as optimizer:
        group = optimizer.param_groups[0]
        assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (1e-4, (0.8, 0.9), 1e-7, 0.0)
    assert (tmp_path / "a").stat().st_size > 0


@pytest.mark.parametrize(
    "kind, arguments, error, message",
    [
        (NearStorageAdam, {"amsgrad": True}, CommandError, "amsgrad must be False, not True"),
        (NearStorageAdamW, {"capturable": True}, CommandError, "capturable must be False, not True"),
        (NearStorageAdamW, {"differentiable": True}, CommandError, "differentiable must be False, not True"),
        (NearStorageAdamW, {"overlap": "always"}, CommandError, "overlap must be 'step' or 'backward', not 'always'"),
        (NearStorageAdamW, {"max_grad_norm": 0.0}, CommandError, "max_grad_norm must be None or positive and finite"),
        (NearStorageAdamW, {"resident_bytes": -1}, CommandError, "resident_bytes must be at least 0, not -1"),
        (NearStorageAdamW, {"momentum": 0.9}, TypeError, "unexpected keyword argument 'momentum'"),
        (NearStorageAdagrad, {"initial_accumulator_value": 0.1}, CommandError, "initial_accumulator_value must be 0"),
        (NearStorageSGD, {"nesterov": True}, CommandError, "nesterov must be False without momentum"),
        (NearStorageSGD, {"state_format": "fp8"}, TypeError, "state_format must be one of fp32, bf16, mx8, not 'fp8'"),
    ],
)
def test_bad_arguments_make_no_file(tmp_path, kind, arguments, error, message):
    with pytest.raises(error, match=message):
        kind(model_of().parameters(), path=tmp_path / "state", **arguments)
    assert list(tmp_path.iterdir()) == []


def test_extra_values_and_the_loss_scale_come_back(open_optimizer, tmp_path):
    model = model_of()
    optimizer = open_optimizer(model.parameters(), loss_scale="dynamic")
    optimizer.metadata["cursor"] = {"epoch": 1, "batch": 7}
    optimizer.scale_loss(model(torch.ones(1, 20)).sum() * float("inf")).backward()
    optimizer.step()
    assert optimizer.report.skipped_steps == 1 and optimizer.loss_scale == 2.0**16, "hysteresis"
    optimizer.zero_grad()
    optimizer.scale_loss(model(torch.ones(1, 20)).sum()).backward()
    optimizer.step()
    optimizer.close()
    again = open_optimizer(model.parameters(), loss_scale="dynamic", resume=True)
    assert again.metadata == {"cursor": {"epoch": 1, "batch": 7}}
    assert again._runner.loss_scale == optimizer._runner.loss_scale
    assert np.isfinite(again.store.read_array("p")).all()


@pytest.mark.parametrize("part", [slice(None), slice(10, 20)])
def test_parameters_in_the_same_memory_are_refused(tmp_path, part):
    """Once the update of one wrote over the other's."""
    model = torch.nn.ModuleDict({"emb": torch.nn.Linear(4, 30, bias=False), "head": torch.nn.Linear(4, 30, bias=False)})
    model["head"].weight.data = model["emb"].weight.data[part]
    with pytest.raises(CommandError, match=r"memory of their own, but 'emb.weight' and 'head.weight' share theirs"):
        NearStorageAdamW(model.named_parameters(), path=tmp_path / "state")
    assert list(tmp_path.iterdir()) == []


def test_settings_of_torch_that_a_group_cannot_have(tmp_path):
    """Once they were ignored: amsgrad, and decay of the other kind, set for one group."""
    for kind, setting, message in (
        (NearStorageAdamW, {"amsgrad": True}, "amsgrad must be False, not True"),
        (NearStorageAdamW, {"decoupled_weight_decay": False}, "decoupled_weight_decay must be True in every group"),
        (NearStorageAdam, {"decoupled_weight_decay": True}, "decoupled_weight_decay must be False in every group"),
    ):
        groups = [{"params": list(model_of().parameters()), **setting}]
        with pytest.raises(CommandError, match=message):
            kind(groups, path=tmp_path / "state")
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("edit", ["append", "replace", "move"])
def test_edited_groups_are_an_error(open_optimizer, edit):
    """Once the step went on with the tensors of construction."""
    model = model_of()
    halves = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]
    optimizer = open_optimizer(halves)
    first, second = (group["params"] for group in optimizer.param_groups)
    if edit == "append":
        second.append(torch.nn.Parameter(torch.ones(3)))
    elif edit == "replace":
        first[0] = torch.nn.Parameter(first[0].detach().clone())
    else:
        second.append(first.pop())
    backward(model, 0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(StateError, match="must be those that the optimizer was constructed with"):
        optimizer.step()
    assert optimizer.steps == 0 and all(map(torch.equal, before, model.parameters()))


# After the end


def test_a_step_after_close_is_an_error(open_optimizer):
    """Once it waited for ever for threads that had ended."""
    model = model_of()
    with open_optimizer(model.parameters()) as optimizer:
        backward(model, 0)
        optimizer.step()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(StateError, match="must be open, not closed"):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
