"""Reference of the selector: the entries with the largest keys, by count or by mass; lower index first among equals."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["select", "select_mass"]

Keys = NDArray[np.uint16]
Mask = NDArray[np.bool_]


def select(keys: Keys, count: int) -> Mask:
    """The `count` entries with the largest keys, (S,); all entries where there are no more than that."""
    mask = np.zeros(len(keys), bool)
    mask[np.argsort(-keys.astype(np.int32), kind="stable")[:count]] = True
    return mask


def select_mass(keys: Keys, weights: NDArray[np.int64], mass: int, cap: int) -> Mask:
    """The entries with the largest keys, as many as hold `mass` · 2^-16 of the weights (S,), at most `cap`.

    Of the entries whose key is the last one needed, all are taken.
    """
    largest_first = np.argsort(-keys.astype(np.int32), kind="stable")
    needed = -(-mass * int(weights.sum()) >> 16)
    crossed = int(np.searchsorted(np.cumsum(weights[largest_first]), needed))
    threshold = keys[largest_first[min(crossed, len(keys) - 1)]]
    return select(keys, min(cap, int(np.count_nonzero(keys >= threshold))))
