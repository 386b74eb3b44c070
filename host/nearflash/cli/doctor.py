"""`nearflash doctor`: what of this machine is in the way of fast and safe generation and training, with remedies.

Nothing is changed; one file of 4 KiB is written to the folder and removed.
"""

import argparse
import json
import mmap
import os
import re
import resource
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from nearflash.abi.errors import CommandError, StateError

__all__ = ["Finding", "doctor", "findings"]

_EXAMPLES = """examples:
  nearflash doctor
  nearflash doctor --folder /mnt/nvme --json
"""
_MEMLOCK_BYTES = 1 << 30
_OPEN_FILES = 1024
_FREE_BYTES = 20 << 30
_IN_MEMORY = {"tmpfs", "ramfs"}
_REMOTE = {"nfs", "nfs4", "cifs", "smb3", "fuse", "fuse.sshfs", "9p", "virtiofs", "ceph", "lustre"}
_TOOLS = ("numpy", "crc32c", "torch", "transformers", "safetensors", "accelerate", "scipy", "triton")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: `state` is ok, warning (slower) or error (fails); a remedy unless ok."""

    what: str
    state: str
    found: str
    remedy: str = ""


def doctor(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "doctor",
        epilog=_EXAMPLES,
        description="List what is wrong with this machine, each finding with its remedy. Exit code 1 with errors.",
    )
    text = "The folder on the drive that is to hold models and caches (default: the current one)."
    parser.add_argument("--folder", type=Path, default=Path(), metavar="DIR", help=text)
    parser.add_argument("--json", action="store_true", help="Print one JSON object a finding.")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if not arguments.folder.is_dir():
        raise CommandError(f"folder must exist, not {str(arguments.folder)!r}")
    every = list(findings(arguments.folder))
    for finding in every:
        if arguments.json:
            print(json.dumps(asdict(finding)))
            continue
        print(f"{finding.state:<9}{finding.what:<18}{finding.found}")
        if finding.remedy:
            print(f"{'':<9}{'':<18}-> {finding.remedy}")
    return 1 if any(finding.state == "error" for finding in every) else 0


def findings(folder: Path, root: Path = Path("/")) -> Iterator[Finding]:
    """Look at everything; `root` is where /proc and /sys lie."""
    yield _memory_locks()
    yield _open_files()
    yield _swap(root)
    yield _huge_pages(root)
    yield _threads()
    yield _queue_of_reads(folder, root)
    yield _file_system(folder, root)
    yield _direct_io(folder)
    yield _rotation(folder, root)
    yield _room(folder)
    yield _gpu(root)
    yield from _versions()


def _text(file: Path) -> str | None:
    try:
        return file.read_text("utf-8", errors="replace").strip()
    except OSError:
        return None


def _memory_locks() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("locked memory", "ok", "unlimited")
    limit = f"{soft / 1e6:.1f} MB may be locked"
    if soft >= _MEMLOCK_BYTES:
        return Finding("locked memory", "ok", limit)
    raised = "ulimit -l unlimited" if hard == resource.RLIM_INFINITY else "'* - memlock unlimited'"
    where = "in this shell" if hard == resource.RLIM_INFINITY else "in /etc/security/limits.d, then log in again"
    return Finding("locked memory", "warning", f"{limit}: pinned buffers and queues of reads need more",
                   f"{raised} {where}; in a service, LimitMEMLOCK=infinity")  # fmt: skip


def _open_files() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = f"{soft} files may be open"
    if soft == resource.RLIM_INFINITY or soft >= _OPEN_FILES:
        return Finding("open files", "ok", limit)
    return Finding("open files", "warning", limit, f"ulimit -n {_OPEN_FILES * 4}")


def _swap(root: Path) -> Finding:
    lines = (_text(root / "proc/swaps") or "").splitlines()[1:]
    if not lines:
        return Finding("swap", "ok", "none")
    size = sum(int(line.split()[2]) for line in lines) << 10
    used = sum(int(line.split()[3]) for line in lines) << 10
    swap_use = f"{used / 1e9:.2f} GB of {size / 1e9:.2f} GB in use"
    if not used:
        return Finding("swap", "ok", swap_use)
    remedy = "end what fills memory, then sudo swapoff -a && sudo swapon -a; or plan with less --host-memory"
    return Finding("swap", "warning", f"{swap_use}: what a plan holds in memory may come from a drive", remedy)


def _huge_pages(root: Path) -> Finding:
    text = _text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", text or "")
    if chosen is None:
        return Finding("huge pages", "warning", "this kernel has no transparent huge pages",
                       "a kernel with CONFIG_TRANSPARENT_HUGEPAGE reads large buffers faster")  # fmt: skip
    if chosen[1] != "never":
        return Finding("huge pages", "ok", f"transparent, {chosen[1]}")
    file = "/sys/kernel/mm/transparent_hugepage/enabled"
    return Finding("huge pages", "warning", "transparent ones are off", f"echo madvise | sudo tee {file}")


def _threads() -> Finding:
    cores = len(os.sched_getaffinity(0))
    given = os.environ.get("OMP_NUM_THREADS")
    if given is None:
        return Finding("threads", "ok", f"{cores} cores; torch chooses its threads")
    if given.isdecimal() and 0 < int(given) <= cores:
        return Finding("threads", "ok", f"{given} threads on {cores} cores")
    return Finding("threads", "warning", f"OMP_NUM_THREADS is {given!r} on {cores} cores",
                   f"export OMP_NUM_THREADS={cores}, or unset it")  # fmt: skip


def _queue_of_reads(folder: Path, root: Path) -> Finding:
    """io_uring, which reads at random places use where it was measured to be faster than io_submit."""
    from nearflash.storage.io.profile import find_profile
    from nearflash.storage.io.queue import usable_queues

    text = _text(root / "proc/sys/kernel/io_uring_disabled")
    if text is not None and text != "0":
        return Finding("io_uring", "warning", f"kernel.io_uring_disabled is {text}: random reads use io_submit",
                       "sudo sysctl kernel.io_uring_disabled=0, and in a container allow its calls")  # fmt: skip
    if missing := usable_queues()["io_uring"]:
        return Finding("io_uring", "warning", f"{missing.partition(':')[0]}: random reads use io_submit",
                       "Linux 5.19 or later on x86_64; in a container allow its calls (seccomp)")  # fmt: skip
    try:
        profile = find_profile(folder)
    except StateError as error:
        return Finding("io_uring", "error", str(error), "nearflash devices --measure FOLDER, without that file")
    chosen = f"random reads use {profile.queue}" if profile else "not measured here: random reads use io_submit"
    return Finding("io_uring", "ok", f"may be used; {chosen}")


def _mount(folder: Path, root: Path) -> str | None:
    """The type of the file system that a folder lies on."""
    best, kind = "", None
    path = str(folder.resolve())
    for line in (_text(root / "proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        point = left.split()[4]
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, right.split()[0]
    return kind


def _file_system(folder: Path, root: Path) -> Finding:
    kind = _mount(folder, root)
    if kind in _IN_MEMORY:
        return Finding("file system", "error", f"{kind}: what is written there stays in memory",
                       "give --folder on a drive")  # fmt: skip
    if kind in _REMOTE:
        return Finding("file system", "warning", f"{kind}: every read crosses a network or a host",
                       "give --folder on a local NVMe drive")  # fmt: skip
    if kind == "overlay":
        return Finding("file system", "warning", "overlay: a container's own layer",
                       "mount a folder of the host's drive into the container")  # fmt: skip
    return Finding("file system", "ok", kind or "unknown")


def _direct_io(folder: Path) -> Finding:
    name = folder / f".nearflash-doctor-{secrets.token_hex(8)}"
    try:
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        name.unlink(missing_ok=True)
        if not os.access(folder, os.W_OK):
            return Finding("direct I/O", "error", f"{folder} is not writable", f"chown or chmod {folder}")
        return Finding("direct I/O", "warning", f"the file system does not open with O_DIRECT ({error.strerror})",
                       "use ext4 or xfs on a local drive")  # fmt: skip
    try:
        with mmap.mmap(-1, 4096) as page:
            os.pwrite(descriptor, page, 0)
            os.preadv(descriptor, [page], 0)
        return Finding("direct I/O", "ok", "reads and writes 4 KiB with O_DIRECT")
    except OSError as error:
        return Finding("direct I/O", "warning", f"4 KiB with O_DIRECT fail ({error.strerror})",
                       "use a file system with blocks of 4 KiB or less")  # fmt: skip
    finally:
        os.close(descriptor)
        name.unlink()


def _rotation(folder: Path, root: Path) -> Finding:
    status = folder.stat().st_dev
    block = root / f"sys/dev/block/{os.major(status)}:{os.minor(status)}"
    # A partition's queue is its drive's.
    text = _text(block / "queue/rotational") or _text(block.resolve().parent / "queue/rotational")
    if text == "1":
        return Finding("drive", "warning", "a rotating disk, or one that claims to be",
                       "give --folder on an SSD; a virtual drive may only report it")  # fmt: skip
    return Finding("drive", "ok", "not rotating" if text == "0" else "the kernel does not state its kind")


def _room(folder: Path) -> Finding:
    usage = shutil.disk_usage(folder)
    free_space = f"{usage.free / 1e9:.1f} GB free of {usage.total / 1e9:.1f} GB"
    if usage.free >= _FREE_BYTES:
        return Finding("free room", "ok", free_space)
    return Finding("free room", "warning", free_space, "remove files, or give --folder on a larger drive")


def _gpu(root: Path) -> Finding:
    text = _text(root / "proc/driver/nvidia/version")
    if text is None:
        return Finding("GPU", "ok", "no NVIDIA driver: everything computes on the CPU")
    version = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return Finding("GPU", "ok", f"NVIDIA driver {version[0] if version else text.splitlines()[0]}")


def _versions(required: Callable[[str], list[str] | None] = requires) -> Iterator[Finding]:
    """Packages against the least version that nearflash states."""
    least: dict[str, str] = {}
    for line in required("nearflash") or ():
        if requirement := re.match(r"([A-Za-z0-9_.-]+)[^;]*?>=\s*([0-9.]+)", line):
            least.setdefault(requirement[1].lower(), requirement[2])
    for tool in _TOOLS:
        wanted = least.get(tool)
        try:
            there = version(tool)
        except PackageNotFoundError:
            if wanted:
                yield Finding(tool, "warning", "not installed", f"pip install '{tool}>={wanted}'")
            continue
        if wanted and _numbers(there) < _numbers(wanted):
            yield Finding(tool, "error", f"{there}, before {wanted}", f"pip install '{tool}>={wanted}'")
        else:
            yield Finding(tool, "ok", there)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0]))
