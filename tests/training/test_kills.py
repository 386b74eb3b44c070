"""A small part of the kill campaign of `nearflash bench crash`."""

import json
import subprocess
import sys
from unittest.mock import ANY

import pytest
import torch

from nearflash.abi.errors import CommandError
from nearflash.bench.training import crash, rank_kills
from nearflash.training import NearStorageAdamW


@pytest.mark.full
@pytest.mark.parametrize("files", [1, 2])
def test_killed_and_resumed_runs_equal_the_whole_one(tmp_path, files):
    options = ["--kills", "5", "--seed", "3", "--files", str(files)]
    command = [sys.executable, "-m", "nearflash.bench.training.kills", str(tmp_path), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    result = json.loads(done.stdout)
    assert result["bad"] == [] and result["kills"] == 5 and result["runs"] >= 1


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "kills"), [(2, 1), (3, 6)])
def test_ranks_go_on_together_when_one_was_killed(tmp_path, ranks, kills):
    options = ["--kills", str(kills), "--seed", "5", "--ranks", str(ranks)]
    command = [sys.executable, "-m", "nearflash.bench.training.rank_kills", str(tmp_path), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert json.loads(done.stdout) == {"kills": kills, "runs": ANY, "bad": []}, done.stderr


def test_what_is_wrong_after_a_killed_rank_is_named(tmp_path):
    """Files of ranks two steps apart, with other bits than were announced, or damaged."""
    for rank, steps in enumerate((1, 3)):
        tensor = torch.nn.Parameter(torch.ones(32))
        with NearStorageAdamW([tensor], path=tmp_path / f"rank{rank}.state") as optimizer:
            for _ in range(steps):
                tensor.grad = torch.ones(32)
                optimizer.step()
    expected = [{step: (0, 0) for step in range(4)}] * 2
    found = rank_kills._find_problems(tmp_path, expected, 2)
    assert found == [
        "rank 0's file: step 1 differs",
        "rank 1's file: step 3 differs",
        "the files are at the steps [1, 3]",
    ]
    (tmp_path / "rank1.state").write_bytes(b"")
    assert "rank 1's file: " in rank_kills._find_problems(tmp_path, expected, 1)[-1]
    assert rank_kills._compare([{1: (0, 1)}, {}], expected) == ["rank 0: step 1 differs"]


def test_the_bench_counts_what_goes_wrong(monkeypatch, capsys):
    monkeypatch.setattr(crash, "inject", lambda folder, files, manifest: crash.Faults(10, ["wrong"] * files))
    (row,) = crash.run(["faults"])
    assert row == {"faults": 40, "bad_faults": 6, "mismatches": 6}
    assert capsys.readouterr().err == "wrong\n" * 6
    with pytest.raises(CommandError, match="parts must be of crashes, kv, blocks, kills, ranks, faults, not x"):
        list(crash.run(["x"]))
