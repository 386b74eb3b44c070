"""Sources of a head's index, K and V: arrays (here), or pages (pages.py).

What is read can depend on what was found before: of the index only the chosen dims, of K and V the unindexed suffix
and the chosen tokens.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.faults import Fault
from nearflash.abi.attention.pages import IndexFormat
from nearflash.model.attention.memory.index import IndexBlock, quantise
from nearflash.model.attention.memory.settings import HeadSettings

__all__ = ["ArraySource", "HeadSource"]

F16 = NDArray[np.float16]


class HeadSource(Protocol):
    """Reads of one head. After a fault less may come than was asked for."""

    tokens: int
    """S."""
    faults: Fault
    """Faults of what was read so far."""

    def blocks(self, dims: NDArray[np.int64]) -> Sequence[IndexBlock]:
        """The index over `dims` (r,) of the tokens that whole blocks cover, in order."""

    def suffix(self, dims: NDArray[np.int64]) -> F16:
        """K (t, r) of the tokens after the index."""

    def read_chosen(self, mask: NDArray[np.bool_]) -> tuple[F16, F16]:
        """K and V (|J|, d) of the tokens of `mask` (S,)."""


class ArraySource:
    """K and V (S, d) as they are; the index as it is built from K."""

    def __init__(self, k: F16, v: F16, settings: HeadSettings) -> None:
        self.tokens = len(k)
        self.faults = Fault(0)
        self._k, self._v, self._settings = k, v, settings

    def blocks(self, dims: NDArray[np.int64]) -> list[IndexBlock]:
        """The index over `dims` (r,)."""
        size, form = self._settings.block_tokens, self._settings.index_format
        parts = [self._k[start : start + size, dims] for start in range(0, self._covered, size)]
        return [part if form is IndexFormat.FP16 else quantise(part, form) for part in parts]

    def suffix(self, dims: NDArray[np.int64]) -> F16:
        """K (t, r) of the tokens after the index."""
        return self._k[self._covered :, dims]

    def read_chosen(self, mask: NDArray[np.bool_]) -> tuple[F16, F16]:
        """K and V (|J|, d)."""
        return self._k[mask], self._v[mask]

    @property
    def _covered(self) -> int:
        return self._settings.count_scanned(self.tokens)
