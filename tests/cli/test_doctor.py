import argparse
import errno
import json
import os
import resource
from pathlib import Path

import pytest

from nearflash.abi.errors import CommandError
from nearflash.cli import doctor as command
from nearflash.cli.doctor import findings
from nearflash.storage.io import queue
from nearflash.storage.io.measure import Rate
from nearflash.storage.io.profile import keep_profile


@pytest.fixture
def root(tmp_path):
    """A machine without faults, as its kernel shows it."""
    root = tmp_path / "root"
    write(root, "proc/swaps", "Filename Type Size Used Priority")
    write(root, "sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never")
    write(root, "proc/sys/kernel/io_uring_disabled", "0\n")
    write(root, "proc/self/mountinfo", "22 1 254:0 / / rw - ext4 /dev/vda rw\n")
    write(root, f"sys/dev/block/{device(tmp_path)}/queue/rotational", "0\n")
    return root


def device(folder):
    number = folder.stat().st_dev
    return f"{os.major(number)}:{os.minor(number)}"


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def found(what, folder, root):
    return next(each for each in findings(folder, root) if each.what == what)


def run(*argv):
    parser = argparse.ArgumentParser()
    command.doctor(parser.add_subparsers())
    arguments = parser.parse_args(["doctor", *map(str, argv)])
    return arguments.run(arguments)


def test_a_machine_without_faults_has_no_remedies(tmp_path, root, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    names = ("locked memory", "open files", "swap", "huge pages", "threads", "io_uring", "file system", "direct I/O",
             "drive", "GPU")  # fmt: skip
    for name in names:
        finding = found(name, tmp_path, root)
        assert (finding.state, finding.remedy) == ("ok", ""), finding
    assert not [each for each in tmp_path.iterdir() if each != root]


@pytest.mark.parametrize(
    ("file", "text", "what", "state", "remedy"),
    [
        ("proc/swaps", "Filename Type Size Used Priority\n/dev/x partition 1048576 524288 -2", "swap", "warning",
         "swapoff"),
        ("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]", "huge pages", "warning",
         "echo madvise"),
        ("sys/kernel/mm/transparent_hugepage/enabled", "", "huge pages", "warning", "CONFIG_TRANSPARENT_HUGEPAGE"),
        ("proc/sys/kernel/io_uring_disabled", "2", "io_uring", "warning", "sysctl kernel.io_uring_disabled=0"),
        ("proc/self/mountinfo", "22 1 0:5 / / rw - tmpfs none rw", "file system", "error", "on a drive"),
        ("proc/self/mountinfo", "22 1 0:5 / / rw - nfs4 server:/x rw", "file system", "warning", "local NVMe"),
        ("proc/self/mountinfo", "22 1 0:5 / / rw - overlay overlay rw", "file system", "warning", "mount a folder"),
    ],
)  # fmt: skip
def test_each_fault_has_its_remedy(tmp_path, root, file, text, what, state, remedy):
    write(root, file, text)
    finding = found(what, tmp_path, root)
    assert finding.state == state and remedy in finding.remedy


def test_the_innermost_mount_counts(tmp_path, root):
    inner = f"30 22 0:9 / {tmp_path.resolve()} rw - xfs /dev/vdb rw"
    near = f"31 22 0:8 / {tmp_path.resolve()}-other rw - tmpfs none rw"
    write(root, "proc/self/mountinfo", f"22 1 254:0 / / rw - tmpfs none rw\n{inner}\n{near}\n")
    assert found("file system", tmp_path, root).found == "xfs"


def test_a_rotating_drive_is_found(tmp_path, root):
    write(root, f"sys/dev/block/{device(tmp_path)}/queue/rotational", "1")
    assert found("drive", tmp_path, root).state == "warning"


@pytest.mark.parametrize("hard", [resource.RLIM_INFINITY, 8 << 20])
def test_little_lockable_memory_and_few_files_are_found(tmp_path, root, monkeypatch, hard):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (512 if kind == resource.RLIMIT_NOFILE else 8 << 20, hard))
    memory = found("locked memory", tmp_path, root)
    assert memory.state == "warning" and memory.found.startswith("8.4 MB may be locked")
    assert ("ulimit -l" in memory.remedy) == (hard == resource.RLIM_INFINITY)
    assert found("open files", tmp_path, root).remedy == "ulimit -n 4096"


@pytest.mark.parametrize(
    ("threads", "state"), [("1", "ok"), ("9999", "warning"), ("many", "warning"), ("0", "warning")]
)
def test_threads_fit_the_cores(tmp_path, root, monkeypatch, threads, state):
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert found("threads", tmp_path, root).state == state


def test_direct_io_that_fails_is_found(tmp_path, root, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "pwrite", refuse)
    assert "4 KiB with O_DIRECT fail" in found("direct I/O", tmp_path, root).found
    monkeypatch.setattr(os, "open", refuse)
    assert "does not open with O_DIRECT" in found("direct I/O", tmp_path, root).found
    assert not list(tmp_path.glob(".nearflash-doctor*"))


def test_little_room_is_found(tmp_path, root, monkeypatch):
    monkeypatch.setattr(command, "_FREE_BYTES", 1 << 60)
    assert found("free room", tmp_path, root).state == "warning"


def test_old_and_missing_packages_are_found(monkeypatch):
    installed = {"numpy": "1.9.2", "torch": "2.13.0+cpu"}

    def version(name):
        if name not in installed:
            raise command.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(command, "version", version)
    stated = ["numpy>=1.26", 'torch>=2.6; extra == "infer"', 'scipy>=1.14; extra == "plan"']
    every = {each.what: each for each in command._versions(lambda _: stated)}
    assert every["numpy"].state == "error" and every["numpy"].remedy == "pip install 'numpy>=1.26'"
    assert every["torch"].state == "ok" and every["scipy"].found == "not installed"
    assert "triton" not in every


def test_the_driver_is_named(tmp_path, root):
    write(root, "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  x")
    assert found("GPU", tmp_path, root).found == "NVIDIA driver 570.86.15"


def test_the_command_prints_and_returns_1_with_errors(tmp_path, capsys, monkeypatch):
    bad = [command.Finding("a", "error", "b", "c"), command.Finding("d", "ok", "e")]
    monkeypatch.setattr(command, "findings", lambda _: iter(bad))
    assert run("--folder", tmp_path) == 1
    assert "-> c" in capsys.readouterr().out
    assert run("--folder", tmp_path, "--json") == 1
    assert json.loads(capsys.readouterr().out.splitlines()[0]) == {"what": "a", "state": "error", "found": "b",
                                                                  "remedy": "c"}  # fmt: skip
    monkeypatch.setattr(command, "findings", lambda _: iter(bad[1:]))
    assert run("--folder", tmp_path) == 0
    with pytest.raises(CommandError, match="folder must exist"):
        run("--folder", tmp_path / "none")


def test_this_machine_is_looked_at(tmp_path):
    every = list(findings(tmp_path))
    assert len(every) > 12 and all(bool(each.remedy) != (each.state == "ok") for each in every)


def test_the_queue_of_reads_that_is_used(tmp_path, root, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(queue, "usable_queues", lambda: {"io_submit": "", "io_uring": ""})
    assert found("io_uring", tmp_path, root).found == "may be used; not measured here: random reads use io_submit"
    rates = [Rate("random", 4096, 1, *3 * [rate], name) for name, rate in (("io_submit", 1.0), ("io_uring", 1.1))]
    file = keep_profile(tmp_path, rates, "2026-01-01")
    assert found("io_uring", tmp_path, root).found == "may be used; random reads use io_uring"
    file.write_text("{")
    damaged = found("io_uring", tmp_path, root)
    assert damaged.state == "error" and "must be a readable JSON file" in damaged.found
    monkeypatch.setattr(queue, "usable_queues", lambda: {"io_uring": "io_uring cannot be had (refused): do this"})
    refused = found("io_uring", tmp_path, root)
    assert (refused.state, refused.found) == ("warning", "io_uring cannot be had (refused): random reads use io_submit")
    assert "seccomp" in refused.remedy
