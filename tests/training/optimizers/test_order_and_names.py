"""State belongs to the tensor that it was made for, whatever tensors are called and in whatever order they come."""

import copy

import pytest
import torch

from nearflash.abi.errors import CommandError, StateError

OPTIONS = {"lr": 0.1, "weight_decay": 0.1}


@pytest.fixture
def pair():
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(40, generator=generator)) for _ in range(2)]


def run(optimizer, tensors, steps=3):
    for step in range(steps):
        optimizer.zero_grad()
        torch.stack([(tensor**2).sum() * (1 + place) + step for place, tensor in enumerate(tensors)]).sum().backward()
        optimizer.step()


def copies(tensors):
    return [torch.nn.Parameter(tensor.detach().clone()) for tensor in tensors]


@pytest.mark.parametrize("how", ["added", "thawed"])
def test_tensors_of_one_name_have_each_its_own_state(open_optimizer, pair, how):
    """The second one got the moments and step count of the first."""
    found = []
    for make in (open_optimizer, torch.optim.AdamW):
        one, other = copies(pair)
        other.requires_grad_(how == "added")
        optimizer = make([("w", one)] + [("w", other)] * (how == "thawed"), **OPTIONS)
        run(optimizer, [one])
        if how == "added":
            optimizer.add_param_group({"params": [("w", other)]})
        other.requires_grad_(True)
        run(optimizer, [one, other])
        found.append((one, other))
    assert all(torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6) for ours, theirs in zip(*found, strict=True))


@pytest.mark.parametrize(
    "edit",
    [
        lambda group: group["params"].reverse(),
        lambda group: group["param_names"].reverse(),
        lambda group: group["param_names"].pop(),
        lambda group: group.pop("param_names"),
    ],
)
def test_order_and_names_must_stay(open_optimizer, pair, edit):
    """With them in another order, a group that was added exchanged the states of two tensors."""
    optimizer = open_optimizer([("a", pair[0]), ("b", pair[1])], **OPTIONS)
    run(optimizer, pair)
    before, group = [tensor.detach().clone() for tensor in pair], optimizer.param_groups[0]
    kept = {key: list(group[key]) for key in ("params", "param_names")}
    edit(group)
    for call in (
        optimizer.step,
        optimizer.full_state_dict,
        lambda: optimizer.add_param_group({"params": [("c", torch.nn.Parameter(torch.ones(3)))]}),
    ):
        with pytest.raises(StateError, match="in their order"):
            call()
    group.update(kept)
    assert all(map(torch.equal, pair, before)) and optimizer.steps == 3
    run(optimizer, pair)


def test_names_of_a_loaded_dict_rename_nothing(open_optimizer, pair):
    optimizer = open_optimizer([("a", pair[0]), ("b", pair[1])], **OPTIONS)
    run(optimizer, pair)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["param_names"] = ["b", "a"]
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["param_names"] == ["a", "b"]
    run(optimizer, pair)


def test_a_name_for_each_tensor(open_optimizer, pair):
    with pytest.raises(CommandError, match="must name its 2 tensors"):
        open_optimizer([{"params": pair, "param_names": ["a"]}], **OPTIONS)


def test_a_full_state_is_of_the_tensors_that_its_groups_state(open_optimizer, pair):
    """As torch reads it: the groups of a dict may name the tensors otherwise than by their place."""
    reference = torch.optim.AdamW(pair, **OPTIONS)
    run(reference, pair)
    saved = copy.deepcopy(reference.state_dict())
    saved["param_groups"][0]["params"] = [1, 0]
    found = []
    for make in (open_optimizer, torch.optim.AdamW):
        tensors = copies(pair)
        optimizer = make(tensors, **OPTIONS)
        getattr(optimizer, "load_full_state_dict", optimizer.load_state_dict)(copy.deepcopy(saved))
        run(optimizer, tensors)
        found.append(tensors)
    assert all(torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6) for ours, theirs in zip(*found, strict=True))


@pytest.mark.parametrize("name, value", [("exp_avg", torch.inf), ("exp_avg_sq", torch.nan), ("exp_avg_sq", -1.0)])
def test_moments_that_no_step_can_use_are_refused_when_they_are_loaded(open_optimizer, pair, name, value):
    """The next step blamed the gradients."""
    optimizer = open_optimizer(pair, **OPTIONS)
    run(optimizer, pair)
    saved = copy.deepcopy(optimizer.full_state_dict())
    saved["state"][1][name][7] = value
    with pytest.raises(StateError, match=f"{name} of '0.1' must be finite"):
        optimizer.load_full_state_dict(saved)
    run(optimizer, pair)
    assert optimizer.steps == 6


@pytest.mark.parametrize("groups", [None, 3, [{"params": None}], [None]])
def test_groups_that_are_none(open_optimizer, pair, groups):
    optimizer = open_optimizer(pair, **OPTIONS)
    for load in (optimizer.load_state_dict, optimizer.load_full_state_dict):
        with pytest.raises(StateError, match="param_groups of state_dict must be"):
            load({"state": {}, "param_groups": groups})


@pytest.mark.parametrize("overlap", ["step", "backward"])
def test_tensors_that_share_their_memory_later(open_optimizer, pair, overlap):
    """Of equal values, so that their contents told nothing: one tensor's update was lost."""
    pair[1].data.copy_(pair[0].data)
    optimizer = open_optimizer(pair, overlap=overlap, **OPTIONS)
    optimizer.zero_grad()
    (pair[0].sum() + pair[1].sum()).backward()
    optimizer.step()
    apart, before = pair[1].data, pair[0].detach().clone()
    pair[1].data = pair[0].data
    with pytest.raises(CommandError, match="must have memory of their own"):
        run(optimizer, pair, steps=1)
    assert torch.equal(pair[0], before) and optimizer.steps == 1
    pair[1].data = apart
    run(optimizer, pair, steps=1)


def test_a_full_state_is_in_host_memory_under_any_default_device(open_optimizer, pair):
    optimizer = open_optimizer(pair, **OPTIONS)
    run(optimizer, pair)
    with torch.device("meta"):
        saved = optimizer.full_state_dict()
        assert all(value.device.type == "cpu" for state in saved["state"].values() for value in state.values())
        optimizer.load_full_state_dict(saved)
    run(optimizer, pair)
