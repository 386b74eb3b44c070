"""Sharded runs that end anyhow and go on: another number of ranks, an earlier checkpoint, ranks that were killed."""

import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from nearflash.abi.errors import StateError
from nearflash.cli.main import main
from nearflash.storage import StateStore
from nearflash.storage.state.ranks import reshard_offline
from nearflash.training import NearStorageAdamW
from nearflash.verify.fixtures.forked import ForkedProgram

WORKER = Path(__file__).with_name("steps_worker.py")


def start(folder, ranks, last, *more):
    (folder / "meet").unlink(missing_ok=True)
    return [
        ForkedProgram(WORKER, str(folder), str(last), f"--rank={rank}", f"--ranks={ranks}", *more)
        for rank in range(ranks)
    ]


def run(folder, ranks, last, *more):
    """What the ranks said, once all have ended well."""
    started = start(folder, ranks, last, *more)
    said = [process.communicate() for process in started]
    assert not any(process.returncode for process in started), said
    return [out for out, _ in said]


@pytest.fixture
def wanted(tmp_path):
    """The parameters after so many steps on one rank, of plain tensors."""

    def train(last, dtype=torch.float32, **more):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Tanh(), torch.nn.Linear(50, 2))
        model[0].to(dtype)
        options = {"lr": 1e-2, "weight_decay": 0.1, "extent_params": 1024} | more
        with NearStorageAdamW(model.parameters(), path=tmp_path / f"plain{last}", **options) as plain:
            for number in range(last):
                generator = torch.Generator().manual_seed(number)
                for parameter in model.parameters():
                    parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                plain.step()
        return list(model.parameters())

    return train


def check(folder, wanted, last, **more):
    found = torch.load(folder / "result.pt")
    assert found["steps"] == last
    assert all(torch.equal(one, two) for one, two in zip(found["values"], wanted(last, **more), strict=True))


def steps_of(folder):
    found = {}
    for path in sorted(folder.glob("rank*.state")):
        with StateStore.open([path]) as store:
            found[path.name] = store.steps
    return found


@pytest.mark.full
def test_two_ranks_go_on_as_one_and_offline_as_three(tmp_path, wanted, capsys):
    run(tmp_path, 2, 2)
    files = [str(path) for path in sorted(tmp_path.glob("rank*.state"))]
    assert main(["state", "reshard", *files, "--ranks", "3", "--to", str(tmp_path / "three")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3 and len(steps_of(tmp_path / "three")) == 3
    back = reshard_offline(sorted((tmp_path / "three").glob("*.state")), tmp_path / "two", 2)
    for path, again in zip(files, back, strict=True):
        with StateStore.open([Path(path)]) as one, StateStore.open([again]) as two:
            assert one.manifest == two.manifest and one.steps == two.steps == 2
            for array in one.manifest.arrays:
                assert (one.read_array(array.name) == two.read_array(array.name)).all()
    run(tmp_path, 1, 4)
    check(tmp_path, wanted, 4)
    assert steps_of(tmp_path) == {"rank0.state": 4}


@pytest.mark.full
def test_a_split_master_goes_on_with_fewer_ranks_and_offline_with_more(tmp_path, wanted):
    """Of a bf16 layer and an fp32 one."""
    run(tmp_path, 2, 2, "--master", "split")
    files = sorted(tmp_path.glob("rank*.state"))
    three = reshard_offline(files, tmp_path / "three", 3)
    for path, again in zip(files, reshard_offline(three, tmp_path / "two", 2), strict=True):
        with StateStore.open([path]) as one, StateStore.open([again]) as two:
            assert one.manifest == two.manifest and one.manifest.master == "split"
            for array in one.manifest.stored:
                assert (one.read_array(array.name) == two.read_array(array.name)).all()
    run(tmp_path, 1, 3, "--master", "split")
    check(tmp_path, wanted, 3, dtype=torch.bfloat16, master="split")


@pytest.mark.full
def test_files_of_ranks_that_do_not_make_a_run_are_refused(tmp_path):
    run(tmp_path, 2, 1)
    files = sorted(tmp_path.glob("rank*.state"))
    with pytest.raises(StateError, match=r"must be those of all ranks of one run, not ranks \[0\]"):
        reshard_offline(files[:1], tmp_path / "other", 2)
    assert not (tmp_path / "other").exists()


@pytest.mark.full
def test_any_number_of_ranks_goes_on_from_any_other(tmp_path, wanted):
    last = 0
    for ranks in (3, 2, 4, 1, 4):
        last += 1
        assert all(f"begins at {last - 1}" in line for line in run(tmp_path, ranks, last))
        assert steps_of(tmp_path) == {f"rank{rank}.state": last for rank in range(ranks)}
    check(tmp_path, wanted, last)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_a_checkpoint_every_two_steps_killed_at_five_resumed_at_four(tmp_path, wanted, ranks):
    started = start(tmp_path, ranks, 8, "--save=2", "--kill=5")
    for process in started:
        process.communicate()
    assert [process.returncode for process in started] == [-9] * ranks
    assert {*steps_of(tmp_path).values()} == {5}
    assert all("begins at 4" in line for line in run(tmp_path, ranks, 8, "--resume=4"))
    check(tmp_path, wanted, 8)
    if ranks > 2:
        assert all("begins at 2" in line for line in run(tmp_path, ranks, 5, "--resume=2"))  # from step 8
        check(tmp_path, wanted, 5)


# The quick guard is the run above, whose ranks are started again by hand.
@pytest.mark.full
def test_torchrun_restarts_all_when_one_rank_is_killed(tmp_path, wanted):
    # Else gloo may find the addresses of the ranks before in torchrun's own store (torch 2.13).
    alone = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    done = subprocess.run(
        [*command, str(WORKER), str(tmp_path), "8", "--kill=5", "--kill_one=1"],
        capture_output=True, text=True, timeout=100, check=False, env=os.environ | alone,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    begun = [int(step) for step in re.findall(r"begins at (\d+)", done.stdout)]
    # Gloo itself may fail to connect after a restart, which is another one.
    assert begun[:2] == [0, 0] and len(begun) >= 4 and {*begun[2:]} <= {4, 5}, done.stdout
    check(tmp_path, wanted, 8)


# The quick guard of this campaign is test_shards.py's rank that is lost within a step.
def kill_one(folder, ranks, last, chance):
    """Kill a rank at some moment of its steps: the others are told. Returns the steps of all files."""
    started = start(folder, ranks, last, "--pause=0.02")
    victim = chance.randrange(ranks)
    started[victim].wait_for("\n")
    time.sleep(chance.uniform(0, 0.4))
    started[victim].kill()
    for rank, process in enumerate(started):
        _, error = process.communicate()
        assert rank == victim or process.returncode == 0 or "StateError: every rank must answer" in error, error
    return steps_of(folder)


@pytest.mark.full
@pytest.mark.parametrize(("kills", "ranks"), [(2, 2), (6, 3)])
def test_one_rank_killed_at_any_moment(tmp_path, wanted, kills, ranks):
    chance, last = random.Random(5), 10_000
    for _ in range(kills):
        steps = kill_one(tmp_path, ranks, last, chance)
        assert max(steps.values()) - min(steps.values()) <= 1, steps
        goal = min(steps.values()) + 1
        assert all(f"begins at {goal - 1}" in line for line in run(tmp_path, ranks, goal))
    check(tmp_path, wanted, goal)
