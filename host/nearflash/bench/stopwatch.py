"""Seconds of a call."""

import time
from collections.abc import Callable

__all__ = ["time_call"]


def time_call(work: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
