"""Two ranks give the bits of one; a crash between their commits, a failure of one, another number of ranks."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from nearflash.abi.errors import CommandError, NonFiniteError
from nearflash.training import NearStorageAdamW
from nearflash.training.integrations.ranks import RankedOptimizer, assign_ranks
from nearflash.verify.fixtures.forked import ForkedProgram

WORKER = Path(__file__).with_name("ranks_worker.py")
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.05, "extent_params": 1024}


def parameters():
    torch.manual_seed(0)
    return list(torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Tanh(), torch.nn.Linear(50, 3)).parameters())


def advance(optimizer, tensors, gradients):
    for tensor, gradient in zip(tensors, gradients, strict=True):
        tensor.grad = gradient.clone()
    optimizer.step()
    optimizer.param_groups[0]["lr"] *= 0.5


def same(one, other):
    return all(torch.equal(a.detach(), b.detach()) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of two ranks that have ended."""
    folder = tmp_path_factory.mktemp("ranks")
    ranks = [ForkedProgram(WORKER, str(rank), str(folder)) for rank in range(2)]
    errors = [process.communicate()[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], errors
    return folder


@pytest.fixture(scope="module")
def two_ranks(folder):
    """What each scenario gave on rank 0 and rank 1."""
    found = [json.loads((folder / f"found{rank}.json").read_text()) for rank in range(2)]
    return {name: [each[name] for each in found] for name in found[0]}


def test_two_ranks(folder, tmp_path):
    found = [torch.load(folder / f"bits{rank}.pt") for rank in range(2)]
    assert same(found[0]["parameters"], found[1]["parameters"])
    assert found[0]["error"] == "no room" and "must work on every rank, and failed on [0]" in found[1]["error"]
    gradients = found[0]["gradients"]
    assert len(gradients) == 4 and all(same(a, b) for a, b in zip(gradients, found[1]["gradients"], strict=True))

    tensors = parameters()
    with NearStorageAdamW(tensors, path=tmp_path / "one", **OPTIONS) as single:
        for step, given in enumerate(gradients):
            if step == 3:
                assert same(tensors, found[0]["before"])
            advance(single, tensors, given)
        assert same(tensors, found[0]["parameters"]) and single.report.grad_norm == found[0]["norm"] > 0.05

    resharded = parameters()
    with torch.no_grad():
        for tensor, value in zip(resharded, found[0]["before"], strict=True):
            tensor.copy_(value)
    with NearStorageAdamW(resharded, path=tmp_path / "resharded", **OPTIONS) as other:
        other.load_full_state_dict(found[1]["full"])
        advance(other, resharded, gradients[3])
    assert same(resharded, found[0]["parameters"])


def test_frozen_tensors_and_ranks_without_a_gradient(two_ranks):
    """A rank may have frozen tensors only: once each step was refused."""
    for steps, difference, updates in two_ranks["frozen"]:
        assert steps == 3 and difference < 1e-6 and updates == [3, 3]


def test_branches_that_ranks_do_not_use(two_ranks):
    for steps, difference in two_ranks["unused"]:
        assert steps == 4 and difference < 1e-6


def test_gradients_that_some_ranks_lack_count(two_ranks):
    for steps, values, there in two_ranks["lacking"]:
        assert steps == 1 and max(values) < 1 and all(there)
    assert two_ranks["lacking"][0] == two_ranks["lacking"][1]


def test_no_gradient_on_any_rank_is_no_step(two_ranks):
    assert two_ranks["without"] == [0, 0]


def test_gradients_must_be_averaged(two_ranks):
    for text, steps, unchanged in two_ranks["not_averaged"]:
        assert text.startswith("CommandError: gradients must be averaged over ranks") and steps == 0 and unchanged


def test_one_ranks_bad_gradient_is_refused_on_all(two_ranks):
    other, mine = two_ranks["sparse"]
    assert mine.startswith("FormatError: gradient of tensor 0 must be dense") and "failed on [1]" in other


def test_an_overflow_is_skipped_on_all_ranks(two_ranks):
    for steps, scales, skipped in two_ranks["overflow"]:
        assert steps == 0 and scales == [65536.0, 32768.0] and skipped == 2


def test_files_of_other_ranks_and_runs(two_ranks):
    for texts, left in two_ranks["files"]:
        assert "but that of rank 0 is rank 1's: give each rank its own path" in texts["swapped"]
        assert "but that of rank 1 is rank 1's of another run" in texts["two runs"]
        assert texts["same"] is None and not left
        assert "must exist on every rank or on none, and do exist on ranks [1]" in texts["one rank, auto"]
        assert "must not exist yet, and do exist on ranks [1]" in texts["one rank, new"]
        assert "opened by as many ranks as wrote them, 2, not 1" in texts["fewer"]
        assert texts["another folder"]


def test_all_ranks_are_released_and_acquired_or_none(two_ranks):
    for rank, found in enumerate(two_ranks["released"]):
        assert found["parameters"].startswith("CommandError: parameters must be False with ranks")
        for call in ("step", "state_dict", "rollback", "still"):
            assert found[call] == "StateError: the optimizer must be acquired, not released: call acquire() first"
        assert ("in use by another process" if rank else "acquiring must work on every rank, and failed on [1]") in (
            found["taken"]
        )
        assert "must be released for acquire" in found["acquired"] and found["same"] and found["steps"] == 3


def test_ranks_go_back_to_a_snapshot(two_ranks):
    for missing, steps, same, last in two_ranks["restored"]:
        assert missing.startswith("StateError: ") and steps == [3, 1] and same and last == 3


def test_ranks_that_disagree_or_do_not_come_are_named_on_every_rank(two_ranks):
    for rank, found in enumerate(two_ranks["disagree"]):
        assert "parameters must be the same on every rank" in found["layout"] and not found["left"]
        assert "but those of ranks [1] are not rank 0's" in found["layout"]
        assert "ranks must be at the same step, or one apart, not at [3, 1]" in found["steps"]
        assert ("must be a state file, not a missing one" if rank else "failed on [1]") in found["missing"]
        assert found["absent"].startswith("StateError: every rank must answer, and ") and found["seconds"] < 30
    assert "ranks [1] were lost or did not come in time" in two_ranks["disagree"][0]["absent"]


def test_distributed_checkpoint_of_two_ranks(two_ranks):
    for steps, difference, rate in two_ranks["checkpoint"]:
        assert steps == 2 and difference < 1e-6 and rate == 0.125


def test_largest_first():
    assert assign_ranks([10, 1, 6, 5], 2) == [0, 0, 1, 1]
    assert assign_ranks([1, 1, 1], 1) == [0, 0, 0] and sorted(assign_ranks([0, 0], 2)) == [0, 1]


def test_one_rank_is_the_optimizer(tmp_path):
    mine, theirs = parameters(), parameters()
    generator = torch.Generator().manual_seed(1)
    groups = [[{"params": tensors[:1], "lr": 1.0}, {"params": tensors[1:]}] for tensors in (mine, theirs)]
    with (
        RankedOptimizer(groups[0], path=tmp_path / "a", **OPTIONS) as a,
        NearStorageAdamW(groups[1], path=tmp_path / "b", **OPTIONS) as b,
    ):
        for _ in range(3):
            gradients = [torch.randn(tensor.shape, generator=generator) for tensor in mine]
            advance(a, mine, gradients)
            advance(b, theirs, gradients)
        assert same(mine, theirs) and a.steps == b.steps == 3
        assert a.param_groups[1]["betas"] == (0.9, 0.999)
        full = a.full_state_dict()["state"]
        assert all(np.array_equal(full[i]["exp_avg"], b.full_state_dict()["state"][i]["exp_avg"]) for i in full)
        a.load_full_state_dict(b.full_state_dict())
        a.load_state_dict(a.state_dict())
        mine[0].grad[0, 0] = float("nan")
        with pytest.raises(NonFiniteError, match=r"gradient of .0\.0. must be finite"):
            a.step()


def test_what_ranks_cannot_do(tmp_path):
    with pytest.raises(CommandError, match="overlap must be 'step' with ranks, not 'backward'"):
        RankedOptimizer(parameters(), path=tmp_path / "x", overlap="backward")
    assert list(tmp_path.iterdir()) == []
