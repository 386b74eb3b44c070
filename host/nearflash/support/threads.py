"""How many threads compute: as many as there are idle processors.

A team of OpenMP threads waits for its slowest member. Where other processes use the processors, one thread of the team
waits for its turn while the others spin, and the team is slower than a single thread.
"""

import ctypes
import functools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from nearflash.abi.errors import CommandError

__all__ = [
    *("CallingThread", "choose_threads", "idle_processors", "ieee_arithmetic", "map_all", "set_ieee_arithmetic"),
    *("set_threads", "threads_environment"),
]

T = TypeVar("T")
R = TypeVar("R")

_VARIABLE = "OMP_NUM_THREADS"
_SAMPLE_S = 0.2
_NEARLY_IDLE = 0.75
"""A processor counts as idle from this share of idle time on."""
_STAT = Path("/proc/stat")
_ENVIRONMENT_BYTES = 512
"""Room for glibc's fenv_t; 32 on x86-64, less elsewhere."""


def idle_processors(sample_s: float = _SAMPLE_S) -> int:
    """Processors of this process that other work leaves idle, at least 1; all of them where Linux does not say.

    Measures for `sample_s` seconds.
    """
    own = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    before = _times()
    if not before:
        return len(own)
    time.sleep(sample_s)
    after, idle = _times(), 0.0
    for processor in own & before.keys() & after.keys():
        total, rest = (end - start for start, end in zip(before[processor], after[processor], strict=True))
        idle += rest / total if total else 1.0
    return min(max(int(idle + 1 - _NEARLY_IDLE), 1), len(own))


def choose_threads(requested: int | None = None) -> int:
    """`requested`, else what OMP_NUM_THREADS says, else idle_processors(). Raises CommandError for less than 1."""
    if requested is not None:
        if requested < 1:
            raise CommandError(f"threads must be at least 1, not {requested!r}")
        return requested
    named = os.environ.get(_VARIABLE, "").partition(",")[0]
    return int(named) if named.isdigit() and int(named) else idle_processors()


def set_threads(requested: int | None = None) -> int:
    """Set the threads of OpenMP libraries to choose_threads(requested), and return the number.

    To be called before torch is imported: then its threads also sleep while they wait, as long as OMP_WAIT_POLICY does
    not say otherwise. A torch that is already imported gets the number alone. Raises CommandError as choose_threads.
    """
    threads = choose_threads(requested)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)
    else:
        os.environ |= threads_environment(threads)
    return threads


def threads_environment(requested: int | None = None) -> dict[str, str]:
    """Variables of a process that is begun with the threads that `set_threads` sets. Raises CommandError as that."""
    waiting = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")
    return {_VARIABLE: str(choose_threads(requested)), "OMP_WAIT_POLICY": waiting}


def set_ieee_arithmetic() -> None:
    """Set the calling thread to round to nearest and to keep subnormals, whatever mode the thread that began it had.

    A new thread inherits both, torch.set_flush_denormal among them. Source: C17 7.6, FE_DFL_ENV; glibc's clears FTZ and
    DAZ, too. Without glibc nothing is changed.
    """
    if sys.platform == "linux":
        fesetenv = getattr(_process(), "fesetenv", None)
        if fesetenv is not None:
            fesetenv(ctypes.c_void_p(-1))  # FE_DFL_ENV of glibc on x86-64, AArch64, RISC-V


@contextmanager
def ieee_arithmetic() -> Iterator[None]:
    """The calling thread computes as set_ieee_arithmetic has it; afterwards as before."""
    fegetenv = getattr(_process(), "fegetenv", None) if sys.platform == "linux" else None
    if fegetenv is None:
        yield
        return
    before = ctypes.create_string_buffer(_ENVIRONMENT_BYTES)
    fegetenv(before)
    set_ieee_arithmetic()
    try:
        yield
    finally:
        _process().fesetenv(before)


class CallingThread(Executor):
    """Runs each call at once, in the thread that submits it, in IEEE arithmetic."""

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Future[Any]:
        """See Executor.submit."""
        done: Future[Any] = Future()
        with ieee_arithmetic():
            done.set_result(call(*arguments, **keywords))
        return done


def map_all(pool: Executor, call: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Results of the call for each item, on a pool's threads.

    Raises the error of the items themselves, or the first item's, when all calls have ended: the memory that they fill
    may be used again then.
    """
    jobs: list[Future[R]] = []
    try:
        for item in items:
            jobs.append(pool.submit(call, item))
    finally:
        for job in jobs:
            job.exception()
    return [job.result() for job in jobs]


@functools.cache
def _process() -> ctypes.CDLL:
    return ctypes.CDLL(None)  # the interpreter is linked with libm


def _times() -> dict[int, tuple[int, int]]:
    """Ticks of each processor since the start: (all, idle). Empty where there is no /proc/stat."""
    try:
        lines = _STAT.read_text().splitlines()
    except OSError:
        return {}
    found = {}
    for name, *ticks in (line.split() for line in lines if line.startswith("cpu") and line[3].isdigit()):
        values = [int(value) for value in ticks[:8]]  # user nice system idle iowait irq softirq steal
        found[int(name[3:])] = sum(values), values[3] + values[4]
    return found
