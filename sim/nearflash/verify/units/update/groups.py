"""Groups of lanes, as the encoder and the decoder of optimizer state take and give them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.sim.verilator.ports import words_from_integers

__all__ = ["BLOCKS", "LANES", "groups"]

LANES = 2
BLOCKS = 40


def groups(elements: NDArray[Any], strobes: list[int] | None = None) -> NDArray[Any]:
    """Groups of elements, of strobes where there are any, and `last`."""
    rows = [int.from_bytes(row.tobytes(), "little") for row in np.ascontiguousarray(elements).reshape(-1, LANES)]
    bits = 32 * LANES
    if strobes is not None:
        rows = [row | strb << bits for row, strb in zip(rows, strobes, strict=True)]
        bits += LANES
    rows[-1] |= 1 << bits
    return words_from_integers(rows, bits + 1)
