"""Sharded parameters (FSDP2) on one to four ranks: the bits of one rank, crashes, failures, checkpoints, refusals."""

import json
from pathlib import Path

import pytest
import torch

from nearflash.storage import StateStore
from nearflash.training import NearStorageAdamW
from nearflash.verify.fixtures.forked import ForkedProgram

WORKER = Path(__file__).with_name("shards_worker.py")
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1, "extent_params": 1024}


@pytest.fixture(scope="module", params=[2, *(pytest.param(ranks, marks=pytest.mark.full) for ranks in (1, 3, 4))])
def folder(request, tmp_path_factory):
    """What the ranks left, which have ended."""
    folder = tmp_path_factory.mktemp("shards")
    ranks = [ForkedProgram(WORKER, str(rank), str(request.param), str(folder)) for rank in range(request.param)]
    errors = [process.communicate()[1] for process in ranks]
    assert not any(process.returncode for process in ranks), errors
    return folder


@pytest.fixture(scope="module")
def found(folder):
    """What each scenario gave, by rank."""
    rows = [json.loads(path.read_text()) for path in sorted(folder.glob("found*.json"))]
    return {name: [row[name] for row in rows] for name in rows[0]}


def test_steps_are_those_of_one_rank_to_the_bit(folder, tmp_path):
    rows = [torch.load(path) for path in sorted(folder.glob("bits*.pt"))]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Tanh(), torch.nn.Linear(50, 2))
    tensors = list(model.parameters())
    with NearStorageAdamW(tensors, path=tmp_path / "one", **OPTIONS) as optimizer:
        for gradients in rows[0]["gradients"]:
            for tensor, gradient in zip(tensors, gradients, strict=True):
                tensor.grad = gradient
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.5
    for row in rows:
        assert all(torch.equal(a, b) for a, b in zip(row["after"], tensors, strict=True))


def test_a_rank_that_fails_leaves_all_at_the_step_before(folder):
    rows = [torch.load(path) for path in sorted(folder.glob("bits*.pt"))]
    assert rows[0]["error"] == "no room" and all(row["unchanged"] for row in rows)
    for row in rows[1:]:
        assert "must work on every rank, and failed on [0]" in row["error"]


def test_one_rank_goes_on_from_the_whole_state(folder, tmp_path):
    row = torch.load(folder / "bits0.pt")
    tensors = [torch.nn.Parameter(values) for values in row["before"]]
    with NearStorageAdamW(tensors, path=tmp_path / "one", **OPTIONS) as optimizer:
        optimizer.load_full_state_dict(row["full"])
        for tensor, gradient in zip(tensors, row["gradients"][2], strict=True):
            tensor.grad = gradient
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(row["after"], tensors, strict=True))


def test_the_norm_is_of_all_shards_and_of_replicas_once(found):
    for row in found["norm"]:
        for ratio, difference in row:
            assert abs(ratio - 1) < 1e-6 and difference < 1e-6


def test_a_checkpoint_of_an_earlier_step_is_restored(found):
    for row in found["checkpoints"]:
        assert row["refused"].startswith("StateError: state_dict must be of step 3 as in the open state files")
        assert row["restored"] and row["third"] and row["lr"] == [0.00125, 0.0025] and row["step"] == 2


def test_whole_and_otherwise_sharded_states_load(found):
    assert all(row == [True, True] for row in found["whole_states"])


def test_a_release_between_steps_changes_no_bit(found):
    for row in found["released"]:
        assert "call acquire()" in row["step"] and "call acquire()" in row["snapshot"] and row["same"]


def test_the_norm_of_partitions_is_of_all_and_of_replicas_once(found):
    ranks = len(found["partitions"])
    for partition, replica in found["partitions"]:
        assert abs(partition - 30 * sum((1 + rank) ** 2 for rank in range(ranks))) < 1e-3 and abs(replica - 60) < 1e-3


def test_a_lost_rank_is_named_and_all_resume_from_one_step(folder):
    rows = [json.loads(path.read_text()) for path in sorted(folder.glob("lost*.json"))]
    states = sorted((folder / "lost").glob("*.state"))
    assert len(rows) == len(states) - 1
    for row in rows:
        assert row["lost"].startswith(
            f"StateError: every rank must answer, and ranks [{len(rows)}] were lost or did not"
        )
    steps = []
    for path in states:
        with StateStore.open([path]) as store:
            steps.append(store.steps)
    assert {1} <= {*steps} <= {1, 2}


def test_what_does_not_fit_is_refused_on_all_ranks(found):
    for rank, row in enumerate(found["refused"]):
        assert "'0.0' must be placed as Shard or Replicate" in row["partial"]
        if len(found["refused"]) > 1:
            assert row["some"].startswith("CommandError: parameter 0 must have a gradient on every rank or on none")
        assert row["replicated"].startswith("FormatError: gradient of parameter 0 must be sharded as the parameter")
        assert row["shape"] == "ShapeError: exp_avg of parameter 0 must have the shape (50, 40), not (3,)"
        assert row["moved"].startswith("StateError: parameter 0 must stay in its memory") and row["steps"] == 0
        assert ("lr must be finite" if rank == 0 else "failed on [0]") in row["rate"] and not row["left"]
