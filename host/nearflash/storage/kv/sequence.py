"""One sequence: how many tokens each layer has, where their pages are, and what is not on flash yet."""

import numpy as np
from numpy.typing import NDArray

from nearflash.storage.flash.geometry import PageNumbers
from nearflash.storage.kv.layout import KvLayout, KvShape

__all__ = ["PageTable", "StoredSequence"]


class PageTable:
    """Page numbers by head and page index; all heads have as many."""

    def __init__(self, heads: int) -> None:
        self._pages = np.zeros((heads, 0), np.int64)
        self._count = 0

    @property
    def pages(self) -> PageNumbers:
        """(heads, page indices)."""
        return self._pages[:, : self._count]

    def extend(self, pages: PageNumbers) -> None:
        """Add (heads, new page indices)."""
        end = self._count + pages.shape[1]
        if end > self._pages.shape[1]:
            grown = np.zeros((len(self._pages), max(end, 2 * self._count)), np.int64)
            grown[:, : self._count] = self.pages
            self._pages = grown
        self._pages[:, self._count : end] = pages
        self._count = end


class StoredSequence:
    """State of one sequence, by layer."""

    def __init__(self, shape: KvShape, layout: KvLayout) -> None:
        heads, dim = shape.kv_heads, shape.dim
        self.lengths = np.zeros(shape.layers, np.int64)
        """Tokens of each layer."""
        tails = (shape.layers, heads, layout.group_tokens, dim)
        self.tail_k, self.tail_v = np.zeros(tails, np.float16), np.zeros(tails, np.float16)
        """Tokens behind the last full group; length mod n of them count."""
        self.v_sum = np.zeros((shape.layers, heads, dim))
        """Of all values: in double precision, so that how they were cut into calls does not show in their mean."""
        self.tokens = [PageTable(heads) for _ in range(shape.layers)]
        """Of the token groups, K's page of separate ones."""
        self.index = [PageTable(heads) for _ in range(shape.layers)]

    def pages(self, group_pages: int) -> NDArray[np.int64]:
        """All pages of the sequence."""
        tokens = [table.pages.reshape(-1, 1) + np.arange(group_pages) for table in self.tokens]
        return np.concatenate([*map(np.ravel, tokens), *(table.pages.ravel() for table in self.index)])
