"""The bench of growing sizes: its rows and what the peak grows by; and one small size that is measured."""

import json
import subprocess

import pytest

from nearflash.abi.errors import CommandError
from nearflash.bench.training import scale, train

MB = 10**6


@pytest.fixture
def processes(monkeypatch):
    """Processes that are not run: 500 MB above weights and gradients, and 10 MB more for each 10^8 parameters."""
    commands = []

    def run(command, **_):
        commands.append(command)
        params = int(command[command.index("--params") + 1])
        figures = {
            "params": params, "optimizer_seconds": [params * 4e-9, params * 1e-9, params * 2e-9],
            "host_peak_bytes": 4 * params + 500 * MB + params // 10, "held_bytes": 4 * params,
            "disk_read_bytes": 6.0 * params, "disk_written_bytes": 6.0 * params,
            "interleaved": [(2.0, 1.0), (4.0, 1.0), (5.0, 2.0)],
        }  # fmt: skip
        return subprocess.CompletedProcess(command, 0, json.dumps(figures), "")

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_rows_and_growth(processes, tmp_path):
    *rows, last = train.run(size="tiny", mode="scale", path=tmp_path)
    assert [row["params"] for row in rows] == [100 * MB, 200 * MB, 400 * MB] and len(processes) == 3
    assert [row["case"] for row in rows] == ["scale-0.1b", "scale-0.2b", "scale-0.4b"]
    assert rows[0]["ns_per_param"] == 2 and rows[0]["disk_bytes_per_param"] == 12
    assert rows[0]["gigabytes_per_second"] == 6 and rows[0]["roofline_fraction"] == 1 / 2.5
    assert [row["bytes_above_weights_and_gradients"] for row in rows] == [510 * MB, 520 * MB, 540 * MB]
    assert last["peak_growth"] == pytest.approx(30 / 510)


def test_a_size_that_fails(monkeypatch, tmp_path):
    failed = subprocess.CompletedProcess([], 137, "", "Killed\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(CommandError, match="7 parameters of the bench ended with status 137: Killed"):
        list(scale.scale(tmp_path, [7]))


def test_one_size_in_this_process(tmp_path, capsys):
    assert scale.main(["--params", "300000", "--path", str(tmp_path)]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (
        figures["held_bytes"] == 4 * 300_000 and len(figures["interleaved"]) == len(figures["optimizer_seconds"]) == 3
    )
    assert figures["disk_read_bytes"] >= 6 * 300_000


@pytest.mark.full
def test_memory_does_not_grow_with_the_state(tmp_path):
    *_, last = scale.scale(tmp_path, [50 * MB, 200 * MB])
    assert last["peak_growth"] <= 0.05
