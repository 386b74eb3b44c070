"""Vectors of the bitmap expander: rows of all lengths and densities; what follows a row's values is anything."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.gateware.weights.bitmap import BitmapExpander
from nearflash.model.weights.bitmap import expand_row
from nearflash.verify.mutants.observed import ObservedStreams

__all__ = ["expander", "vectors"]

_WIDTH = 4
_ROWS = 120


def expander() -> ObservedStreams:
    """The smallest one."""
    return ObservedStreams(BitmapExpander(_WIDTH, 8))


def vectors(rng: np.random.Generator) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Rows of one to nine beats, now and then of many; without ones, with some, or with all."""
    beats, words, expected = [], [], []
    for _ in range(_ROWS):
        count = int(rng.choice([1, 2, 3, 9, 40], p=[0.3, 0.3, 0.2, 0.18, 0.02]))
        present = rng.random((count, _WIDTH)) < rng.choice([0, 0.1, 0.5, 0.9, 1])
        if rng.integers(4) == 0:
            present[: rng.integers(count + 1)] = 0
        values = rng.integers(0, 256, -(-int(present.sum()) // _WIDTH) * _WIDTH, np.uint8)
        bitmap = np.packbits(present.reshape(-1), bitorder="little").tobytes()
        dense = expand_row(bitmap, values.tobytes(), present.size, np.uint8)
        last = np.arange(count) == count - 1
        beats.append(present @ (1 << np.arange(_WIDTH)) | last << _WIDTH)
        words.append(values.view("<u4"))
        expected.append(dense.view("<u4").astype(np.uint64) | last.astype(np.uint64) << np.uint64(8 * _WIDTH))
    inputs: dict[str, NDArray[Any]] = {"i_bitmap": np.concatenate(beats).astype(np.uint8)}
    return inputs | {"i_value": np.concatenate(words)}, {"o": np.concatenate(expected)}
