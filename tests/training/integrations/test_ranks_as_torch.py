"""RankedOptimizer on one rank, where scripts use it as torch's: what needs two ranks is in test_ranks."""

import copy

import pytest
import torch
from torch.distributed.checkpoint import state_dict as dcp

from nearflash.abi.errors import StateError
from nearflash.training import LossScale
from nearflash.training.integrations.ranks import RankedOptimizer, assign_ranks


@pytest.fixture
def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 3))


@pytest.fixture
def opened(tmp_path):
    """A RankedOptimizer on a file of its own, closed at the end."""
    made = []

    def open_it(params, path="state", **options):
        made.append(RankedOptimizer(params, path=tmp_path / path, lr=1e-2, extent_params=1024, **options))
        return made[-1]

    yield open_it
    for optimizer in made:
        optimizer.close()


def train(net, optimizer, *numbers, scale=1.0):
    for number in numbers:
        optimizer.zero_grad()
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(number))
        (net(x).square().mean() * scale).backward()
        optimizer.step()


def close_to(net, other):
    return all(
        torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(net.parameters(), other.parameters(), strict=True)
    )


def test_asking_for_the_state_is_no_step(net, opened):
    """torch.distributed.checkpoint steps with zero gradients where `state` is empty: once 8 steps for 4."""
    other = copy.deepcopy(net)
    mine, theirs = opened(net.parameters()), torch.optim.AdamW(other.parameters(), lr=1e-2)
    assert mine.state
    for number in range(4):
        train(net, mine, number)
        train(other, theirs, number)
        for each, optimizer in ((net, mine), (other, theirs)):
            dcp.get_optimizer_state_dict(each, optimizer)
    assert mine.steps == 4 and close_to(net, other)


def test_state_dicts_carry_the_learning_rate(net, opened):
    """Through torch's own call and through torch.distributed.checkpoint; once the next step took the old one."""
    optimizer = opened(net.parameters())
    train(net, optimizer, 0)
    for save, load in (
        (optimizer.state_dict, optimizer.load_state_dict),
        (
            lambda: dcp.get_optimizer_state_dict(net, optimizer),
            lambda saved: dcp.set_optimizer_state_dict(net, optimizer, saved),
        ),
        (optimizer.full_state_dict, optimizer.load_full_state_dict),
    ):
        optimizer.param_groups[0]["lr"] = 0.25
        saved = copy.deepcopy(save())
        optimizer.param_groups[0]["lr"] = 0.5
        load(saved)
        assert optimizer.param_groups[0]["lr"] == 0.25
    before = [p.detach().clone() for p in net.parameters()]
    train(net, optimizer, 1)
    assert max((a - b).abs().max() for a, b in zip(net.parameters(), before, strict=True)) > 0.1, (
        "the step took that rate"
    )
    with pytest.raises(StateError, match=r"must be of step 3 as in the open state files \(tensor 0\), not 2"):
        optimizer.load_state_dict(saved | {"state": saved_handles(optimizer, nearflash_step=2)})
    with pytest.raises(StateError, match="must come from a RankedOptimizer"):
        optimizer.load_state_dict(torch.optim.AdamW(net.parameters()).state_dict())


def saved_handles(optimizer, **changes):
    return {index: handle | changes for index, handle in optimizer.state_dict()["state"].items()}


def test_schedulers_that_ask_for_the_defaults(net, opened):
    optimizer = opened(net.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5)
    train(net, optimizer, 0)
    schedule.step()
    assert optimizer.defaults["eps"] == 1e-8 and optimizer.param_groups[0]["betas"][0] < 0.95


def test_hooks_see_steps_and_dicts(net, opened):
    optimizer, seen = opened(net.parameters()), []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.register_load_state_dict_pre_hook(lambda _, given: given | {"state": given["state"]["nested"]})
    optimizer.register_state_dict_post_hook(lambda _, given: given | {"state": {"nested": given["state"]}})
    train(net, optimizer, 0)
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["before", "after"]


def test_metadata_is_there_after_a_resume(net, opened):
    optimizer = opened(net.parameters())
    optimizer.metadata["epoch"] = 3
    train(net, optimizer, 0)
    optimizer.close()
    assert opened(net.parameters(), resume=True).metadata == {"epoch": 3}


def test_loss_scale(net, opened):
    other = copy.deepcopy(net)
    optimizer = opened(net.parameters(), loss_scale=LossScale(8.0, window=2))
    theirs = torch.optim.AdamW(other.parameters(), lr=1e-2)
    assert optimizer.loss_scale == 8.0 and optimizer.scale_loss(torch.tensor(2.0)) == 16.0
    for number in range(2):
        train(net, optimizer, number, scale=optimizer.loss_scale)
        train(other, theirs, number)
    assert optimizer.loss_scale == 16.0 and close_to(net, other)
    train(net, optimizer, 9, scale=float("inf"))
    assert optimizer.steps == 2 and optimizer.report.skipped_steps == 1


def test_grad_scaler(net, opened):
    """As with one rank's optimizer: the gradients stay scaled, and a step with overflow is skipped."""
    other = copy.deepcopy(net)
    mine, theirs = opened(net.parameters()), torch.optim.AdamW(other.parameters(), lr=1e-2)
    for each, optimizer in ((net, mine), (other, theirs)):
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        for number in range(4):
            optimizer.zero_grad()
            x = torch.randn(8, 20, generator=torch.Generator().manual_seed(number))
            loss = scaler.scale(each(x).square().mean())
            (loss * (float("inf") if number == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert mine.steps == 3 and close_to(net, other)


def test_what_scripts_edit(net, opened):
    """As torch, or an error that names it; nothing is passed over."""
    optimizer = opened(net.parameters())
    train(net, optimizer, 0)
    for edit in (
        lambda: optimizer.state.clear(),
        lambda: optimizer.state[net[0].weight].update(step=0),
        lambda: optimizer.state[net[0].weight].update(step=torch.ones(3)),
        lambda: optimizer.state.pop(net[0].weight),
    ):
        edit()
        with pytest.raises(StateError, match="state must be changed by this optimizer only"):
            train(net, optimizer, 1)
        optimizer.load_state_dict(optimizer.state_dict() | {"state": saved_handles_of(optimizer)})
    optimizer.param_groups[0]["params"].pop()
    with pytest.raises(StateError, match=r'group\["params"\] must be the tensors'):
        train(net, optimizer, 1)
    assert optimizer.steps == 1
    with pytest.raises(StateError, match="must not be copied or pickled"):
        copy.deepcopy(optimizer)
    optimizer.close()
    with pytest.raises(StateError, match="must be open, not closed"):
        optimizer.step()


def saved_handles_of(optimizer):
    return {index: dict(optimizer.local.state[tensor]) for index, tensor in enumerate(optimizer._rank_of)}


def test_groups_added_before_the_first_step(net, opened):
    other = copy.deepcopy(net)
    mine = opened(net[0].parameters())
    mine.add_param_group({"params": net[2].parameters(), "lr": 0.05})
    theirs = torch.optim.AdamW(other[0].parameters(), lr=1e-2)
    theirs.add_param_group({"params": other[2].parameters(), "lr": 0.05})
    for number in range(2):
        train(net, mine, number)
        train(other, theirs, number)
    assert close_to(net, other) and len(mine.state) == 4
    mine.close()
    again = [{"params": net[0].parameters()}, {"params": net[2].parameters()}]
    assert opened(again, resume=True).steps == 2


def test_rollback(net, opened):
    optimizer = opened(net.parameters())
    train(net, optimizer, 0)
    before = [p.detach().clone() for p in net.parameters()]
    train(net, optimizer, 1)
    optimizer.rollback()
    assert optimizer.steps == 1 and all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_full_states_under_another_default_dtype(net, opened):
    optimizer = opened(net.parameters())
    train(net, optimizer, 0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        full = optimizer.full_state_dict()["state"]
        optimizer.load_full_state_dict({"state": full, "param_groups": optimizer.state_dict()["param_groups"]})
    finally:
        torch.set_default_dtype(torch.float32)
    assert {full[index][name].dtype for index in full for name in ("exp_avg", "exp_avg_sq")} == {torch.float32}
    with pytest.raises(
        StateError, match=r"must be of groups of \[4\] tensors, as this optimizer's, not of \[4\] \(with"
    ):
        optimizer.load_full_state_dict(optimizer.full_state_dict() | {"state": {7: full[0]}})


def test_groups_are_shared_out_one_after_the_other():
    assert assign_ranks([5, 5, 1], 2, [3, 9]) == [0, 0, 1]
