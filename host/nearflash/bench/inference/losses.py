"""Losses of texts against those of dense attention: the change in percent, and its error over texts."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["loss_delta"]


def loss_delta(losses: NDArray[np.float64], dense: NDArray[np.float64]) -> tuple[float, float | None]:
    """Percent by which the losses are above dense, and the jackknife's standard error; None for one text."""
    count = len(losses)
    delta = float(100 * (losses.sum() / dense.sum() - 1))
    if count == 1:
        return delta, None
    without = 100 * ((losses.sum() - losses) / (dense.sum() - dense) - 1)
    return delta, float(np.sqrt((count - 1) / count * ((without - without.mean()) ** 2).sum()))
