"""Faults: each call of each operation fails once, in each way that such a call can fail.

Operations: create; open and read; step (read all, write all, commit), the first one after opening; rollback. The error
must be a named one that tells the file, the open store must still read its last step exactly, and opened again it must
be exactly at a version that was committed or being committed, and go on from there. A failed creation leaves no file.
"""

import errno
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nearflash.abi.errors import StateError, StorageFullError
from nearflash.bench.storage.disk import LoggedDisk
from nearflash.bench.storage.history import MANIFEST, Oracle, Version
from nearflash.storage.state.manifest import Manifest
from nearflash.storage.state.state_store import StateStore

__all__ = ["FAULTS", "OPERATIONS", "Faults", "inject"]

SHORT = -1
"""Instead of an errno: half of the bytes are moved, and no error is reported."""
FAULTS = {
    "read": (errno.EIO, SHORT),
    "write": (errno.EIO, errno.ENOSPC, SHORT),
    "flush": (errno.EIO, errno.ENOSPC),
}
"""How each call of a back end can fail."""
OPERATIONS: dict[str, tuple[Version, ...]] = {
    "create": (),
    "open": ((2, 0),),
    "step": ((2, 0), (3, 0)),
    "rollback": ((2, 0), (1, 0)),
}
"""What is done, and the versions at which the store may be found after it failed; the first is the last committed."""


@dataclass
class Faults:
    """How many faults were injected, and what was wrong after some of them."""

    injected: int = 0
    bad: list[str] = field(default_factory=list)


class FaultyDisk(LoggedDisk):
    """Fails once: at call number `at` from when it was armed, in the `kind`-th way of that call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.fault = 0
        self._at, self._kind, self._lock = -1, 0, threading.Lock()

    def arm(self, at: int, kind: int) -> None:
        """Count calls from here on."""
        self.calls, self._at, self._kind = [], at, kind

    def read(self, fd: int, memory: memoryview, offset: int) -> int:
        """See IoBackend.read."""
        return super().read(fd, memory[: self._length("read", memory)], offset)

    def write(self, fd: int, memory: memoryview, offset: int) -> int:
        """See IoBackend.write."""
        return super().write(fd, memory[: self._length("write", memory)], offset)

    def flush(self, fd: int) -> None:
        """See IoBackend.flush."""
        self._length("flush", memoryview(b""))
        super().flush(fd)

    def _length(self, call: str, memory: memoryview) -> int:
        with self._lock:
            self.calls.append(call)
            if len(self.calls) - 1 != self._at:
                return len(memory)
            self.fault = FAULTS[call][self._kind % len(FAULTS[call])]
        if self.fault == SHORT:
            return len(memory) // 2
        raise OSError(self.fault, os.strerror(self.fault))


class FaultVector:
    """One operation on a store of its own, at version (2, 0) before it."""

    def __init__(self, operation: str, paths: Sequence[Path], manifest: Manifest) -> None:
        self.operation, self.paths = operation, paths
        self.disk, self._oracle = FaultyDisk(), Oracle(manifest)
        self._store: StateStore | None = None
        if operation != "create":
            self._store = self._oracle.create(StateStore, paths, self.disk)
            for version in ((1, 0), (2, 0)):
                self._step(version)
            self._store.close()
            self._store = None if operation == "open" else self._open()

    def act(self) -> None:
        """Do it. Raises StateError where a call failed."""
        if self.operation == "create":
            self._store = self._oracle.create(StateStore, self.paths, self.disk)
        elif self.operation == "open":
            self._store = self._open()
            self._oracle.is_at(self._store, (2, 0))
        elif self.operation == "step":
            assert self._store is not None
            self._oracle.is_at(self._store, (2, 0))
            self._step((3, 0))
        else:
            assert self._store is not None
            self._store.rollback()

    def problems(self) -> Iterator[str]:
        """Do it with the fault armed; what is wrong with the error and with the store afterwards."""
        versions = OPERATIONS[self.operation]
        try:
            self.act()
            yield "no error was raised"
        except StateError as error:
            full = isinstance(error, StorageFullError)
            if full != (self.disk.fault == errno.ENOSPC) or not any(str(path) in str(error) for path in self.paths):
                yield f"the error is {error!r}"
        self.disk.arm(-1, 0)
        if not versions:
            if left := list(self.paths[0].parent.iterdir()):
                yield f"{left} were left behind"
            return
        # A rollback that fails on its way to the drive has left the step already.
        readable = versions if self.operation == "rollback" else versions[:1]
        if self._store is not None and self._oracle.find_version(self._store, readable) is None:
            yield "the open store does not read its last step"
        self.close()
        with self._open() as self._store:
            version = self._oracle.find_version(self._store, versions)
            if version is None:
                yield f"it opens at step {self._store.steps}, not exactly at one of {versions}"
                return
            self._step((version[0] + 1, 1))
        with self._open() as store:
            if not self._oracle.is_at(store, (version[0] + 1, 1)):
                yield "it does not go on"

    def close(self) -> None:
        """Close the store."""
        if self._store is not None:
            self._store.close()

    def _open(self) -> StateStore:
        return StateStore.open(self.paths, direct=False, backend=self.disk)

    def _step(self, version: Version) -> None:
        assert self._store is not None
        self._oracle.write(self._store, version)
        self._oracle.commit(self._store, version)


def inject(folder: Path, *, files: int, manifest: Manifest = MANIFEST) -> Faults:
    """Every fault at every call of every operation, on states of so many files in `folder`."""
    faults = Faults()
    for operation in OPERATIONS:
        calls = _run(folder, operation, files, manifest, faults, at=-1, kind=0)
        for at, call in enumerate(calls):
            for kind in range(len(FAULTS[call])):
                _run(folder, operation, files, manifest, faults, at, kind)
    return faults


def _run(folder: Path, operation: str, files: int, manifest: Manifest, faults: Faults, at: int, kind: int) -> list[str]:
    """One case, in a folder of its own; returns the calls of the operation. Without a fault it must succeed."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        case = FaultVector(operation, [Path(name) / f"state-{index}" for index in range(files)], manifest)
        case.disk.arm(at, kind)
        if at < 0:
            case.act()
            calls = case.disk.calls
        else:
            faults.injected += 1
            what = f"{operation} of {files} files, call {at}, fault {kind}"
            try:
                faults.bad += [f"{what}: {problem}" for problem in case.problems()]
            except Exception as error:  # what is not a named error counts as bad, whatever it is
                faults.bad.append(f"{what}: {error!r}")
            calls = []
        case.close()
    return calls
