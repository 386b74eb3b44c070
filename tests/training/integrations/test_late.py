"""Sharded parameters whose files are opened late: tensors are swapped before that, and refused afterwards."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nearflash.abi.errors import CommandError, StateError
from nearflash.training import NearStorageAdamW
from nearflash.training.integrations.shards import ShardedOptimizer

WORKER = Path(__file__).with_name("late_worker.py")
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1, "extent_params": 1024}


@pytest.fixture
def tensors():
    def make():
        generator = torch.Generator().manual_seed(3)
        return [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in (40, 7)]

    return make


@pytest.fixture
def late(tensors, tmp_path):
    """An optimizer, of one rank, that has no files yet."""
    (tmp_path / "late").mkdir(exist_ok=True)
    with ShardedOptimizer(tensors(), path=tmp_path / "late", **OPTIONS) as optimizer:
        yield optimizer


def swap(optimizer, new):
    """As accelerate does: stand-ins, which keep the address, then the shards."""
    parameters = optimizer.param_groups[0]["params"]
    for index, parameter in enumerate(parameters):
        parameters[index] = torch.empty(1)
        parameters[index].data_ptr = parameter.data_ptr()
    if new is not None:
        optimizer.param_groups[0]["params"] = list(new)


def train(optimizer, tensors, turns=2):
    for turn in range(turns):
        for tensor in tensors:
            tensor.grad = torch.full_like(tensor, 0.5 + turn)
        optimizer.step()


def test_tensors_are_swapped_before_the_first_step(late, tensors, tmp_path):
    mine, theirs = tensors(), tensors()
    assert late.state and not list((tmp_path / "late").iterdir())
    late.load_state_dict(late.state_dict())  # as accelerate does when it wraps
    assert late.state
    swap(late, mine)
    late.param_groups[0]["lr"] = 1e-3  # as a schedule
    late.metadata["cursor"] = 4
    train(late, mine)
    with NearStorageAdamW(theirs, path=tmp_path / "one", **(OPTIONS | {"lr": 1e-3})) as other:
        train(other, theirs)
    assert late.steps == 2 and late.store.status().metadata["cursor"] == 4
    assert all(torch.equal(one, two) for one, two in zip(mine, theirs, strict=True))


def test_swaps_after_the_first_step_are_refused(late, tensors):
    train(late, late.param_groups[0]["params"], 1)
    swap(late, mine := tensors())
    with pytest.raises(StateError, match="must be the tensors that the optimizer opened its files with"):
        train(late, mine)
    assert late.steps == 1


def test_a_stand_in_is_refused(late):
    swap(late, None)
    with pytest.raises(CommandError, match=r"parameter '0.0' must be a tensor, not what stands in for it"):
        late.step()


def test_what_needs_files_says_how_to_open_them(late):
    for call in (lambda: late.steps, lambda: late.store, late.full_state_dict):
        with pytest.raises(StateError, match=r"must have opened its files: call prepare\(\)"):
            call()


def test_a_resumed_run_opens_before_its_first_step(late, tensors, tmp_path):
    trained = late.param_groups[0]["params"]
    train(late, trained)
    handle = late.state_dict()
    late.close()
    mine = tensors()
    with ShardedOptimizer(mine, path=tmp_path / "late", resume=True, **OPTIONS) as again:
        with pytest.raises(StateError, match="a run that is resumed, here at step 2, must be opened before"):
            train(again, mine, 1)
        assert again.steps == 2 and all(torch.equal(one, two) for one, two in zip(mine, trained, strict=True))
    with ShardedOptimizer(other := tensors(), path=tmp_path / "late", resume=True, **OPTIONS) as again:
        again.load_state_dict(handle)
        train(again, other, 1)
        assert again.steps == 3


@pytest.mark.full
def test_accelerate_and_trainer_on_both_of_its_paths(tmp_path):
    ranks = 2  # Trainer refuses FSDP with one
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(ranks), str(tmp_path)],
            stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    errors = [process.communicate(timeout=280)[1].decode() for process in started]
    assert not any(process.returncode for process in started), errors
    for rank in range(ranks):
        found = json.loads((tmp_path / f"late{rank}.json").read_text())
        assert found == {
            "accelerate": True, "reloaded": True, "swap": [4, True], "sharded": [4, True], "resumed": True
        }  # fmt: skip
