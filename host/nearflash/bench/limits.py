"""A limit of memory for a child process: a cgroup (v1 or v2), whose pages of files count too, or else RLIMIT_DATA."""

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

__all__ = ["limit_memory"]

_CGROUPS = Path("/sys/fs/cgroup")


@contextmanager
def limit_memory(limit_bytes: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Limit memory: by what, and the function that a child calls to be limited."""
    for root, file in ((_CGROUPS / "memory", "memory.limit_in_bytes"), (_CGROUPS, "memory.max")):
        group = root / f"nearflash-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue  # not mounted, or not ours to write to
        try:
            if not (group / file).exists():
                continue  # an ordinary folder, or a group without the controller of memory
            (group / file).write_text(str(limit_bytes))
            yield "cgroup", partial(_enter, group)
        finally:
            group.rmdir()
        return
    limits = (limit_bytes, limit_bytes)
    yield "RLIMIT_DATA", partial(resource.setrlimit, resource.RLIMIT_DATA, limits)


def _enter(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))
