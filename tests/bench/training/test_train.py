"""The bench's rows and ratios, from processes that are made up; and what a process measures of itself."""

import json
import subprocess
import sys

import pytest

from nearflash.abi.errors import CommandError
from nearflash.bench.training import train
from nearflash.bench.training.measured import beside_the_disk, measure

PARAMS = 1_000_000
SECONDS = dict.fromkeys(train.CASES, 0.5) | {"deepspeed-nvme": 3.0, "nearflash-host": 1.0, "torch-memory": 0.25}


@pytest.fixture
def processes(monkeypatch, tmp_path):
    """Commands of the cases' processes, which are not run; DeepSpeed is there."""
    commands = []

    def run(command, **_):
        commands.append(command)
        case = command[3]
        times = [SECONDS[case] * factor for factor in (1, 9, 1, 0.5, 1)]
        interleaved = [(1.0, 0.5, 0.25), (8.0, 1.0, 1.0), (2.0, 1.5, 1.5)] if "--disk" in command else []
        figures = {
            "params": PARAMS, "optimizer_seconds": times, "step_seconds": [2 * t for t in times], "loss": [7.0, 6.0],
            "host_peak_bytes": 5, "link_bytes": 8.0 * PARAMS, "disk_read_bytes": 12.0 * PARAMS,
            "disk_written_bytes": 12.0 * PARAMS, "interleaved": interleaved,
        }  # fmt: skip
        return subprocess.CompletedProcess(command, 0, "text before\n" + json.dumps(figures), "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(train, "BASELINE", tmp_path / "deepspeed")
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / ".stamp").touch()
    return commands


def test_rows_and_ratios(processes, tmp_path):
    rows = {row.get("case"): row for row in train.run(size="tiny", path=tmp_path / "disk")}
    assert set(rows) == {*SECONDS, "disk", None}
    ours = rows["nearflash-host"]
    assert (ours["optimizer_seconds"], ours["optimizer_seconds_least"], ours["optimizer_seconds_most"]) == (1, 0.5, 9)
    assert (ours["step_seconds"], ours["host_peak_bytes"], ours["link_bytes_per_param"]) == (2, 5, 8)
    assert ours["disk_read_bytes_per_param"] == 12 and ours["durable"] and not rows["deepspeed-nvme"]["durable"]
    assert rows["disk"]["read_bytes"] == 12 * PARAMS and rows["disk"]["optimizer_seconds"] == 1
    assert sum("--disk" in command for command in processes) == 1
    last = rows[None]
    assert last["speedup_optimizer_over_deepspeed"] == 6 and last["speedup_case"] == "nearflash-host-all"
    assert last["speedup_optimizer_by_case"]["nearflash-host"] == 3 and last["optimizer_seconds_over_memory"] == 4
    assert last["host_peak_bytes_over_deepspeed"] == 1
    assert (
        last["speedup_optimizer_by_case"]["nearflash-host-mx8"]
        == last["speedup_step_by_case"]["nearflash-host-all"]
        == 6
    )
    assert last["disk_bytes_per_param_by_case"]["nearflash-host-split-mx8-1e-6"] == 24
    assert last["disk_roofline_fraction"] == 0.5  # the median of the steps' own fractions
    assert last["disk_roofline_fraction_in_cache"] == 0.25
    assert rows["disk"]["roofline_fraction_least"] == 0.125
    assert processes[0][0].endswith("deepspeed/bin/python") and processes[1][0] == sys.executable
    assert list((tmp_path / "disk").iterdir()) == []


def test_without_deepspeed_the_row_says_how_to_get_it(processes, tmp_path):
    (tmp_path / "deepspeed" / ".stamp").unlink()
    rows = list(train.run(["deepspeed-nvme", "nearflash-host"], "tiny", tmp_path))
    assert rows[0]["missing"] == f"DeepSpeed is not installed in {tmp_path / 'deepspeed'}: make baseline"
    assert rows[-1]["speedup_optimizer_over_deepspeed"] is None and rows[-1]["optimizer_seconds_over_memory"] is None
    assert rows[-1]["disk_roofline_fraction"] == 0.5 and len(processes) == 1


@pytest.mark.parametrize(
    "options, message",
    [
        ({"parts": ["zero"]}, "parts must be of deepspeed-nvme, .*, not zero"),
        ({"size": "huge"}, "size must be of smollm2-135m, tiny, not huge"),
    ],
)
def test_unknown_names(options, message, tmp_path):
    with pytest.raises(CommandError, match=message):
        list(train.run(**options, path=tmp_path))


def test_a_place_without_room(monkeypatch, tmp_path):
    monkeypatch.setitem(train.SIZES, "tiny", 10**15)
    with pytest.raises(CommandError, match="room: the state of 1,000,000,000,000,000 parameters takes"):
        list(train.run(size="tiny", path=tmp_path))


def test_a_case_that_fails(processes, tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 3, "", "Traceback\nMemoryError: none left\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(CommandError, match="case 'torch-memory' of the bench ended with status 3: MemoryError: none"):
        list(train.run(["torch-memory"], "tiny", tmp_path))


def test_what_a_process_measures(tmp_path):
    class Writer:
        """Writes 4096 bytes a step around the page cache's delay."""

        link_bytes = 0
        calls = []

        def gradients(self, step):
            self.calls.append(step)
            return 1.0 / (step + 1)

        def update(self):
            (tmp_path / f"{len(self.calls)}").write_bytes(bytes(4096))
            self.link_bytes += 10

    found = measure(Writer(), PARAMS, 3, warm_up=2)
    assert Writer.calls == [0, 1, 2, 3, 4] and found.loss == [1 / 3, 1 / 4, 1 / 5]
    assert len(found.optimizer_seconds) == 3 and found.link_bytes == 10
    assert 4096 <= found.disk_written_bytes <= 3 * 4096  # a new block of the folder counts too
    assert all(step > update > 0 for step, update in zip(found.step_seconds, found.optimizer_seconds, strict=True))
    assert found.host_peak_bytes > 1 << 20 and found.interleaved == []
    beside_the_disk(Writer(), found, tmp_path, 5, 2)
    assert (
        Writer.calls[5:] == [5, 6] and len(found.interleaved) == 2 and all(min(turn) > 0 for turn in found.interleaved)
    )


@pytest.mark.full
def test_the_cases_that_need_nothing_else(tmp_path):
    rows = {row.get("case"): row for row in train.run(["nearflash-host", "torch-memory"], "tiny", tmp_path)}
    ours, memory = rows["nearflash-host"], rows["torch-memory"]
    assert 12 <= ours["disk_read_bytes_per_param"] < 12.2 and 12 <= ours["disk_written_bytes_per_param"] < 12.5
    assert 4 <= ours["link_bytes_per_param"] < 4.1 and memory["link_bytes_per_param"] is None
    assert ours["last_loss"] == pytest.approx(memory["last_loss"], rel=1e-3)
