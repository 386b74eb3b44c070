"""A small part of the kill campaign of `nearflash bench crash`."""

import json
import subprocess
import sys

import pytest

from nearflash.abi.errors import CommandError
from nearflash.bench.training import crash


@pytest.mark.parametrize("files", [pytest.param(1, marks=pytest.mark.full), 2])
def test_killed_and_resumed_runs_equal_the_whole_one(tmp_path, files):
    options = ["--kills", "5", "--seed", "3", "--files", str(files)]
    command = [sys.executable, "-m", "nearflash.bench.training.kills", str(tmp_path), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    result = json.loads(done.stdout)
    assert result["bad"] == [] and result["kills"] == 5 and result["runs"] >= 1


def test_the_bench_counts_what_goes_wrong(monkeypatch, capsys):
    monkeypatch.setattr(crash, "inject", lambda folder, files: crash.Faults(10, ["wrong"] * files))
    (row,) = crash.run(["faults"])
    assert row == {"faults": 20, "bad_faults": 3, "mismatches": 3}
    assert capsys.readouterr().err == "wrong\n" * 3
    with pytest.raises(CommandError, match="parts must be of crashes, kv, kills, faults, not x"):
        list(crash.run(["x"]))
