"""bf16 as the upper halves of fp32 words, which numpy has no type for."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["bf16_patterns", "bf16_values"]

# Not ml_dtypes: it would save two lines, and every host device would depend on one more compiled package.


def bf16_patterns(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Patterns, in the lower halves, of values rounded to nearest even; of a NaN not always that of one."""
    words = values.view(np.uint32)
    return (words + (words >> np.uint32(16) & np.uint32(1)) + np.uint32(0x7FFF)) >> np.uint32(16)


def bf16_values(patterns: NDArray[Any]) -> NDArray[np.float32]:
    """Values of patterns: exact."""
    return (patterns.astype(np.uint32) << 16).view(np.float32)
