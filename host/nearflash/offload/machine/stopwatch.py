"""Seconds of what a device of torch computes."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

__all__ = ["finish", "seconds_of"]


def finish(device: torch.device) -> None:
    """Wait for what was begun."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds_of(device: torch.device, work: Callable[[], Any], repeats: int = 10) -> float:
    """The median of some repeats, after one that warms up."""
    seconds = []
    for _ in range(repeats + 1):
        finish(device)
        start = time.perf_counter()
        work()
        finish(device)
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:])
