"""Findings about a place for optimizer state before a training run takes it: one finding a line.

    file system, mount and drive -> room -> direct I/O -> write cache -> measured rates -> seconds a step, drive life

A step reads and writes the whole state once; the file holds two of it. Linux only.
"""

import os
import resource
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from nearflash.abi.errors import NearflashError
from nearflash.abi.formats import BF16
from nearflash.abi.optimizers import AdamStep, MasterFormat, OptimizerStep
from nearflash.storage.io.backend import BLOCK_BYTES
from nearflash.storage.io.bandwidth import Probe
from nearflash.storage.io.direct import DirectFile, aligned_buffer
from nearflash.storage.state.layout import LOG_HALVES

__all__ = ["Mount", "Notice", "Severity", "StateSizes", "preflight"]

PROBE_BYTES = 256 << 20
"""File that the rates are measured in; smaller where the state is."""
MEMLOCK_BYTES = 64 << 20
"""Memory that may be locked: buffers that a board or a GPU reads by itself are, some 60 MB for two extents."""
DRIVE_LIFE_STEPS = 100_000
"""Fewer steps within the drive's rated writes are a warning."""
_ADAM = AdamStep(lr=0.0, step=1)
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "fuse.sshfs", "overlay")
_MOUNTS = Path("/proc/self/mountinfo")
_SYS_BLOCK = Path("/sys/dev/block")


class Severity(StrEnum):
    """How a finding bears on the run."""

    OK = "ok"
    WARNING = "warning"
    """It works, but slowly or not for long."""
    ERROR = "error"
    """No state can be made there."""


@dataclass(frozen=True)
class Notice:
    """One line of the report."""

    level: Severity
    subject: str
    text: str

    def __str__(self) -> str:
        return f"{self.level:<9}{self.subject:<13}{self.text}"


@dataclass(frozen=True)
class StateSizes:
    """Sizes of an optimizer's state."""

    params: int
    rule: OptimizerStep = _ADAM
    """Which arrays lie beside the master, and their format."""
    master: MasterFormat = MasterFormat.FP32

    @property
    def step_bytes(self) -> int:
        """Written in a step, and read but for the weights of a split master, of which mostly changes are written."""
        arrays = (*self.master.arrays, *self.rule.arrays)
        return sum(self.rule.state_format.array_bytes(array, self.params) for array in arrays)

    @property
    def file_bytes(self) -> int:
        """Two slots, a log of a split master's weights, and 2 % for tables and the padding between tensors."""
        log_bytes = LOG_HALVES * BF16.bytes * self.params if self.master is MasterFormat.SPLIT else 0
        return int(2.04 * self.step_bytes) + log_bytes + (1 << 20)


@dataclass(frozen=True)
class Mount:
    """The file system under a path."""

    point: Path
    kind: str
    source: str
    device: str
    """Major and minor number, as 259:1."""

    @classmethod
    def of(cls, path: Path) -> "Mount":
        """The innermost mount that holds `path`."""
        best = cls(Path("/"), "unknown", "unknown", "0:0")
        for line in _MOUNTS.read_text().splitlines():
            before, _, after = line.partition(" - ")
            fields, (kind, source, *_) = before.split(), after.split()
            point = Path(fields[4].encode().decode("unicode_escape"))
            if path.is_relative_to(point) and len(point.parts) >= len(best.point.parts):
                best = cls(point, kind, source, fields[2])
        return best

    def queue(self, name: str) -> str | None:
        """A property of the drive's queue (/sys/block/…/queue); None where there is no such drive."""
        drive = _SYS_BLOCK / self.device
        for folder in (drive, drive.resolve().parent):  # a partition has the queue of its drive
            if (folder / "queue" / name).is_file():
                return (folder / "queue" / name).read_text().strip()
        return None


def preflight(
    path: Path, state: StateSizes, *, rated_tb: float | None = None, measure: bool = True, sharing: int = 1
) -> Iterator[Notice]:
    """Findings for a state on `path` (a folder, or a file to be made in one); the last one where it is an error.

    rated_tb: terabytes that the drive may be written in its life (TBW). `measure`: read and write a file there.
    sharing: files of this size that the same file system is to hold, this one included.
    """
    state = replace(state, params=state.params * sharing)
    folder = (path if path.is_dir() else path.parent).resolve()
    checks: tuple[Callable[[], Iterator[Notice]], ...] = (
        lambda: _place(path, folder),
        lambda: _room(folder, state),
        lambda: _direct(folder),
        lambda: _drive(folder),
        _memlock,
        lambda: _rates(folder, state) if measure else iter(()),
        lambda: _life(state, rated_tb),
    )
    for check in checks:
        for finding in check():
            yield finding
            if finding.level is Severity.ERROR:
                return


def _place(path: Path, folder: Path) -> Iterator[Notice]:
    if not folder.is_dir():
        yield Notice(Severity.ERROR, "path", f"{path} must be in a folder that exists: make {folder}, or give another")
        return
    mount = Mount.of(folder)
    where = f"{mount.kind} on {mount.source}, mounted on {mount.point}"
    if mount.kind in _IN_MEMORY:
        text = f"{where}: it is memory, which the state is to save; give a path on a drive"
        yield Notice(Severity.ERROR, "file system", text)
        return
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        text = f"{where}, is read-only; mount it for writing (mount -o remount,rw {mount.point}), or give another path"
        yield Notice(Severity.ERROR, "file system", text)
        return
    if not os.access(folder, os.W_OK | os.X_OK):
        text = f"{folder} must be writable for user {os.getuid()}: see its owner and mode, or give another path"
        yield Notice(Severity.ERROR, "path", text)
        return
    if mount.kind in _REMOTE:
        text = f"{where}: not a local drive's; rates and flushes are those of its server or lower layer"
        yield Notice(Severity.WARNING, "file system", text)
        return
    yield Notice(Severity.OK, "file system", where)
    if path.exists() and not path.is_dir():
        if path.is_file() or path.is_block_device():
            text = f"{path} exists: an optimizer opens a state there with resume=True, and makes none over it"
            yield Notice(Severity.WARNING, "path", text)
        else:
            text = f"{path} must be a file or a block device, not a pipe, socket or other device: give another path"
            yield Notice(Severity.ERROR, "path", text)


def _room(folder: Path, state: StateSizes) -> Iterator[Notice]:
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    need = f"the state of {state.params:,} parameters takes {_gb(state.file_bytes)} (two slots)"
    if free < state.file_bytes:
        text = f"{need}, and {_gb(free)} are free: {_gb(state.file_bytes - free)} short; free them or use more drives"
        yield Notice(Severity.ERROR, "room", text)
    else:
        yield Notice(Severity.OK, "room", f"{need}; {_gb(free)} are free")


def _direct(folder: Path) -> Iterator[Notice]:
    logical = Mount.of(folder).queue("logical_block_size")
    if logical and int(logical) > BLOCK_BYTES:
        text = f"the drive's blocks must be at most {BLOCK_BYTES} bytes, not {logical}; reformat it (nvme format)"
        yield Notice(Severity.ERROR, "direct I/O", text)
        return
    try:
        with tempfile.TemporaryDirectory(prefix=".nearflash-", dir=folder) as inside:
            with DirectFile.create(Path(inside) / "block", BLOCK_BYTES) as file:
                file.write(0, aligned_buffer(BLOCK_BYTES))
                file.flush()
    except (NearflashError, OSError) as error:
        yield Notice(Severity.ERROR, "direct I/O", str(error))
        return
    blocks = f"the drive's are of {logical}" if logical else "of an unknown drive"
    yield Notice(Severity.OK, "direct I/O", f"O_DIRECT works in blocks of {BLOCK_BYTES} bytes; {blocks}")


def _drive(folder: Path) -> Iterator[Notice]:
    mount = Mount.of(folder)
    cache = mount.queue("write_cache")
    if cache is None:
        text = f"no drive of {mount.source} in {_SYS_BLOCK}: whether a flush reaches the flash is unknown"
        yield Notice(Severity.WARNING, "write cache", text)
    elif cache == "write back":
        yield Notice(Severity.OK, "write cache", "write back: a step is durable after its flush, which takes time")
    else:
        yield Notice(Severity.OK, "write cache", f"{cache}: the drive has none, or one that survives a power cut")
    if mount.queue("rotational") == "1":
        yield Notice(
            Severity.WARNING, "drive", "the kernel takes it for a rotating disk (virtual drives often look so)"
        )


def _memlock() -> Iterator[Notice]:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or limit >= MEMLOCK_BYTES:
        yield Notice(Severity.OK, "memlock", "enough memory may be locked for a board or a GPU")
    else:
        text = f"{limit >> 20} MiB may be locked (ulimit -l): enough without a board; with one raise it to "
        yield Notice(Severity.WARNING, "memlock", f"{text}{MEMLOCK_BYTES >> 20} MiB")


def _rates(folder: Path, state: StateSizes) -> Iterator[Notice]:
    size = min(PROBE_BYTES, max(state.file_bytes, 64 << 20))
    try:
        with Probe(folder, size) as probe:
            written, read, both = probe.write(size), probe.read(size), probe.both(size // 2, size // 2)
    except NearflashError as error:
        yield Notice(Severity.ERROR, "rates", str(error))
        return
    text = (
        f"{size / read / 1e9:.2f} GB/s read, {size / written / 1e9:.2f} written, {size / both / 1e9:.2f} both at once"
    )
    yield Notice(Severity.OK, "rates", f"{text} (a file of {size >> 20} MiB)")
    seconds = 2 * state.step_bytes * both / size
    moved = f"{_gb(state.step_bytes)} read and as many written"
    yield Notice(Severity.OK, "step", f"{moved} in about {seconds:.3g} s, if nothing else is slower")


def _life(state: StateSizes, rated_tb: float | None) -> Iterator[Notice]:
    if rated_tb is None:
        text = f"each step writes {_gb(state.step_bytes)}; give the drive's rated writes (TBW) for how many it takes"
        yield Notice(Severity.OK, "drive life", text)
        return
    steps = int(rated_tb * 1e12 / state.step_bytes)
    level = Severity.OK if steps >= DRIVE_LIFE_STEPS else Severity.WARNING
    yield Notice(level, "drive life", f"{steps:,} steps of {_gb(state.step_bytes)} within {rated_tb:g} TB written")


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.3g} GB"
