"""fp16 operands for the tests of the attend kernel's numbers."""

import numpy as np
import pytest

from nearflash.abi.formats import FP16
from nearflash.verify.fixtures.vectors import corner_values


@pytest.fixture(scope="session")
def fp16_values():
    """`count` finite fp16 values: half corners (zeros, subnormals, largest, one-hot, runs), half any pattern."""

    def draw(count: int, seed: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        corners = corner_values(FP16).astype(np.uint16)
        corners = corners[np.isfinite(corners.view(np.float16))]
        anything = rng.integers(0, 1 << 16, count, dtype=np.uint16)
        anything = np.where(np.isfinite(anything.view(np.float16)), anything, anything ^ np.uint16(0x4000))
        chosen = np.where(rng.integers(0, 2, count) == 0, rng.choice(corners, count), anything)
        return chosen.view(np.float16)

    return draw
