"""Seconds of what a device of torch computes."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

__all__ = ["finish", "seconds_between", "seconds_of", "times_per_second"]

_LEAST_PAIRS = 3


def finish(device: torch.device) -> None:
    """Wait for what was begun."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds_of(device: torch.device, work: Callable[[], Any], repeats: int = 10) -> float:
    """The median of some repeats, after one that warms up."""
    _time(device, work)
    return median(_time(device, work) for _ in range(repeats))


def seconds_between(
    device: torch.device, longer: Callable[[], Any], shorter: Callable[[], Any], least_s: float
) -> float:
    """How much longer one takes than the other: the median of pairs, which go on for `least_s` seconds.

    A machine that becomes slower meanwhile is so for both of a pair.
    """
    for work in (shorter, longer):
        _time(device, work)
    pairs = list[tuple[float, float]]()
    while len(pairs) < _LEAST_PAIRS or sum(map(sum, pairs)) < least_s:
        pairs.append((_time(device, longer), _time(device, shorter)))
    return median(more - less for more, less in pairs)


def times_per_second(work: Callable[[], Any], least_s: float) -> float:
    """How often a second, of `least_s` seconds and a last time begun in them; for work that ends when it returns."""
    start, times = time.perf_counter(), 0
    while (spent := time.perf_counter() - start) < least_s or not times:
        work()
        times += 1
    return times / spent


def _time(device: torch.device, work: Callable[[], Any]) -> float:
    finish(device)
    start = time.perf_counter()
    work()
    finish(device)
    return time.perf_counter() - start
