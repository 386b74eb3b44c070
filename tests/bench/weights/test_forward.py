"""Caps of memory for a child process, and the arithmetic of the rows of loading and forward."""

import os
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("accelerate")

from nearflash.bench import limits
from nearflash.bench.weights import forward, loading
from nearflash.bench.weights.forward import LargeModel
from nearflash.weights import compress_tensor, read_file, write_file

LIMIT_BYTES = 96 << 20


def ends(enter, size_bytes):
    """Exit status of a child that writes to so many bytes."""
    command = [sys.executable, "-S", "-c", f"print(len(b'x' * {size_bytes}))"]
    return subprocess.run(command, capture_output=True, preexec_fn=enter, check=False, timeout=60).returncode


def groups():
    return [each for each in limits._CGROUPS.glob(f"**/nearflash-{os.getpid()}*")]


def test_a_child_is_limited_and_its_parent_is_not():
    """By membership and limit: what becomes of a group's processes that go beyond it is the kernel's, and on a machine
    whose out-of-memory killer spares them they wait for ever."""
    before = groups()
    with limits.limit_memory(LIMIT_BYTES) as (kind, enter):
        code = "import resource; print(open('/proc/self/cgroup').read(), resource.getrlimit(resource.RLIMIT_DATA)[0])"
        command = [sys.executable, "-S", "-c", code]
        said, plain = (
            subprocess.run(command, capture_output=True, text=True, preexec_fn=each, check=True, timeout=60).stdout
            for each in (enter, None)
        )
        if kind == "cgroup":
            (group,) = set(groups()) - set(before)
            (limit,) = (file for name in ("memory.limit_in_bytes", "memory.max") if (file := group / name).exists())
            assert f"/{group.name}" in said and int(limit.read_text()) == LIMIT_BYTES
        else:
            assert said.split()[-1] == str(LIMIT_BYTES)
        assert f"nearflash-{os.getpid()}" not in plain and plain.split()[-1] != str(LIMIT_BYTES)
    assert groups() == before


def test_no_group_is_left_after_an_error():
    before = groups()
    with pytest.raises(ZeroDivisionError), limits.limit_memory(LIMIT_BYTES):
        raise ZeroDivisionError
    assert groups() == before


@pytest.mark.parametrize("folder", ["memory", "."])
def test_a_folder_without_the_memory_controller_does_not_limit(tmp_path, monkeypatch, folder):
    """A plain file was written there, named as a cgroup's, and the child ran without a limit."""
    (tmp_path / folder).mkdir(exist_ok=True)
    monkeypatch.setattr(limits, "_CGROUPS", tmp_path)
    with limits.limit_memory(LIMIT_BYTES) as (kind, enter):
        assert kind == "RLIMIT_DATA"
        assert ends(enter, 1 << 20) == 0 and ends(enter, 4 * LIMIT_BYTES) != 0
    assert not list((tmp_path / folder).glob("nearflash*"))


@pytest.mark.parametrize(("code", "expected"), [
    ("print('{}'); print('{\"seconds\": 2}')", {"seconds": 2}),
    ("import sys; sys.exit('first\\nno room')", {"skipped": "accelerate did not end: no room"}),
    ("import os; os._exit(3)", {"skipped": "accelerate did not end: exit status 3"}),
])  # fmt: skip
def test_a_case_is_what_its_process_prints_or_why_it_did_not(tmp_path, monkeypatch, code, expected):
    run = subprocess.run
    monkeypatch.setattr(limits, "_CGROUPS", tmp_path / "none")
    monkeypatch.setattr(subprocess, "run", lambda command, **options: run([sys.executable, "-c", code], **options))
    assert forward._case("accelerate", tmp_path, LIMIT_BYTES) == {**expected, "limited_by": "RLIMIT_DATA"}


def model_of(tmp_path, *formats):
    return LargeModel({name: tmp_path / name for name in formats}, ["up"], 1000)


def test_passes_are_compared_with_accelerates(tmp_path, monkeypatch):
    cases = {
        "dense": {"seconds": 6.0, "logits": "a", "peak_bytes": 500},
        "bitmap": {"seconds": 2.0, "logits": "a", "peak_bytes": 250},
        "coded-bitmap": {"seconds": 12.0, "logits": "b", "peak_bytes": 2000},
    }
    monkeypatch.setattr(forward, "disk_rate", lambda path: 1.5)
    monkeypatch.setattr(forward, "_case", lambda case, folder, limit_bytes: cases[folder.name])
    rows = list(forward.measure(model_of(tmp_path, *cases), tmp_path, 77))
    assert [row["case"] for row in rows] == ["accelerate", "bitmap", "coded-bitmap"]
    assert [row["speedup_over_accelerate"] for row in rows] == [1, 3, 0.5]
    assert [row["mismatches"] for row in rows] == [0, 0, 1]
    assert [row["peak_fraction_of_dense_bytes"] for row in rows] == [0.5, 0.25, 2]
    assert all((row["limit_bytes"], row["dense_bytes"], row["disk_read_gbps"]) == (77, 1000, 1.5) for row in rows)
    cases["dense"] = {"skipped": "killed"}
    rows = list(forward.measure(model_of(tmp_path, *cases), tmp_path))
    assert rows[0]["skipped"] == "killed" and not any("speedup_over_accelerate" in row for row in rows)


def test_loading_takes_the_median_of_the_passes_after_the_first(tmp_path, monkeypatch):
    seconds = {"dense": iter([99, 4, 5, 3, 4, 8, 4, 4]), "bitmap": iter([99, 2, 1, 2, 3, 2, 2, 2]),
               "int8": iter([0.1] + 7 * [8])}  # fmt: skip
    stored = {"dense": 8_000_000, "bitmap": 6_000_000, "int8": 4_000_000}
    passes = []

    def tensors(folder, names):
        assert names == ["up"]
        return {folder.name: SimpleNamespace(stored_bytes=stored[folder.name], dense_bytes=8_000_000)}

    def one_pass(weights):
        passes.append(*weights)
        return float(next(seconds[passes[-1]]))

    monkeypatch.setattr(loading, "_tensors", tensors)
    monkeypatch.setattr(loading, "_pass", one_pass)
    monkeypatch.setattr(loading, "WeightsMap", nullcontext)
    monkeypatch.setattr(loading, "disk_rate", lambda path: 1.5)
    monkeypatch.setattr(loading, "_rate_beside", lambda path, tensors: 0.001)
    rows = {row["format"]: row for row in loading.measure(model_of(tmp_path, *stored), tmp_path)}
    assert passes == [*stored] * 8  # the cases are interleaved
    assert [row["seconds"] for row in rows.values()] == [4, 2, 8]
    assert [row["seconds_range"] for row in rows.values()] == [[3, 8], [1, 3], [8, 8]]
    assert [row["bytes_fraction"] for row in rows.values()] == [1, 0.75, 0.5]
    assert [row["speedup_over_dense"] for row in rows.values()] == [1, 2, 0.5]
    assert [row["speedup_over_bytes_ratio"] for row in rows.values()] == pytest.approx([1, 1.5, 0.25])
    assert rows["bitmap"]["output_gbps"] == 0.004 and rows["bitmap"]["read_gbps"] == 0.003
    assert all(row["disk_read_gbps"] == 1.5 for row in rows.values())
    beside = [row["read_over_disk_beside"] for row in rows.values()]
    assert beside == pytest.approx([0.002 / 1.5, 3, 0.5])


def test_the_disks_rate_beside_expanding_is_measured_while_all_cores_expand(tmp_path, monkeypatch):
    values = np.zeros((64, 64), np.float16)
    values[::2] = 1
    packed = compress_tensor("up", values)
    write_file(tmp_path / "file", {"up": ("F16", values.shape)}, [packed])
    calls = []

    def rate(path):
        before, deadline = len(calls), time.monotonic() + 60
        while len(calls) < before + 3:
            assert time.monotonic() < deadline, "nothing is expanded"
            time.sleep(0.001)
        return 2.5

    monkeypatch.setattr(loading, "disk_rate", rate)
    monkeypatch.setattr(loading, "expand", lambda *a, **k: calls.append(threading.get_ident()))
    threads = threading.active_count()
    assert loading._rate_beside(tmp_path, [*read_file(tmp_path / "file").values()]) == 2.5
    assert threading.active_count() == threads and threading.get_ident() not in calls
