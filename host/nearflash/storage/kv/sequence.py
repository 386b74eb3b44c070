"""One sequence: how many tokens each layer has, where their pages are, and what of them is in memory."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nearflash.storage.flash.geometry import PageNumbers
from nearflash.storage.kv.layout import KvLayout, KvShape

__all__ = ["PageTable", "PartialGroup", "StoredSequence", "Tags"]


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

    def truncate(self, count: int) -> PageNumbers:
        """Keep the first page indices; those of the others, (heads, dropped)."""
        dropped = self._pages[:, count : self._count].copy()
        self._count = min(count, self._count)
        return dropped

    def replace(self, place: tuple[int, int], old: int, new: int) -> None:
        """A page of (head, page index) has another number, where the table still has it."""
        if place[1] < self._count and self._pages[place] == old:
            self._pages[place] = new

    def copy(self) -> "PageTable":
        """The same pages, in a table of its own."""
        other = PageTable(len(self._pages))
        other.extend(self.pages)
        return other


@dataclass(frozen=True)
class Tags:
    """The numbers that pages go by in their headers: one from each start on, a KV page group's or an index block's."""

    starts: tuple[int, ...]
    numbers: tuple[int, ...]

    @property
    def last(self) -> int:
        """The tag of pages to come."""
        return self.numbers[-1]

    def of(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tags of groups, or blocks, by number."""
        if len(self.numbers) == 1:
            return np.full(places.shape, self.numbers[0], np.int64)
        return np.array(self.numbers, np.int64)[np.searchsorted(self.starts, places, side="right") - 1]

    def then(self, start: int, number: int) -> "Tags":
        """The tags with another number from `start` on."""
        kept = [(at, old) for at, old in zip(self.starts, self.numbers, strict=True) if at < start]
        starts, numbers = zip(*kept, (start, number), strict=True)
        return Tags(starts, numbers)


@dataclass(frozen=True)
class PartialGroup:
    """The place on flash of a sequence's tokens after its last full KV page group, as it was when it had `tokens`."""

    tokens: int
    number: int
    """That the pages go by; nothing else does."""
    pages: NDArray[np.int64]
    """(layers, heads): of separate groups K's page."""

    def all_pages(self, group_pages: int) -> NDArray[np.int64]:
        """V's pages, too."""
        return (self.pages[..., None] + np.arange(group_pages)).ravel()


class StoredSequence:
    """State of one sequence, by layer. After the last multiple of `suffix_tokens` (n or T) tokens are in memory."""

    def __init__(self, shape: KvShape, layout: KvLayout, suffix_tokens: int, tag: int) -> None:
        heads, dim = shape.kv_heads, shape.dim
        self.token_tags = self.index_tags = Tags((0,), (tag,))
        self.lengths = np.zeros(shape.layers, np.int64)
        """Tokens of each layer."""
        self.suffix_tokens = suffix_tokens
        self._suffixes = np.zeros((2, shape.layers, heads, suffix_tokens, dim), np.float16)
        self.v_sum = np.zeros((shape.layers, heads, dim))
        """Of all values: in double precision, so that how they were cut into calls does not show in their mean."""
        self.tokens = [PageTable(heads) for _ in range(shape.layers)]
        """Of the KV page groups, K's page of separate ones."""
        self.partial: PartialGroup | None = None
        self.index = [PageTable(heads) for _ in range(shape.layers)]

    @property
    def suffix_bytes(self) -> int:
        """Memory for unindexed suffixes."""
        return self._suffixes.nbytes

    def suffix(self, layer: int) -> NDArray[np.float16]:
        """K and V in memory, (2, heads, u, d): a view."""
        return self._suffixes[:, layer, :, : self.lengths[layer] % self.suffix_tokens]

    def memory(self, layer: int) -> tuple[NDArray[np.float16], int] | None:
        """The suffixes of all layers, (2, layers, heads, T, d), and this one's tokens; None where some are on flash."""
        tokens = int(self.lengths[layer])
        return (self._suffixes, tokens) if tokens < self.suffix_tokens else None

    def with_suffix(self, layer: int, kv: NDArray[np.float16]) -> NDArray[np.float16]:
        """K and V in memory, and kv (2, heads, t, d) after them; nothing that counts is changed."""
        used = int(self.lengths[layer]) % self.suffix_tokens
        end = used + kv.shape[2]
        if end > self.suffix_tokens:
            return np.concatenate([self.suffix(layer), kv], axis=2)
        self._suffixes[:, layer, :, used:end] = kv
        return self._suffixes[:, layer, :, :end]

    def push(self, layer: int, k: NDArray[np.float16], v: NDArray[np.float16]) -> None:
        """The layer goes on with k and v (heads, t, d), which fit beside what is in memory."""
        used = int(self.lengths[layer]) % self.suffix_tokens
        end = used + k.shape[1]
        self._suffixes[0, layer, :, used:end], self._suffixes[1, layer, :, used:end] = k, v
        self.lengths[layer] += k.shape[1]

    def extend(self, layer: int, kv: NDArray[np.float16]) -> None:
        """The layer now ends with kv (2, heads, u + t, d), as `with_suffix` gave it."""
        used, size = int(self.lengths[layer]) % self.suffix_tokens, kv.shape[2]
        left = size % self.suffix_tokens
        if size > self.suffix_tokens:
            self._suffixes[:, layer, :, :left] = kv[:, :, size - left :]
        self.lengths[layer] += size - used

    def memory_start(self, layer: int) -> int:
        """The first token that is in memory."""
        return int(self.lengths[layer]) // self.suffix_tokens * self.suffix_tokens

    def set_suffix(self, layer: int, kv: NDArray[np.float16], tokens: int) -> None:
        """The layer has so many tokens, of which kv (2, heads, u, d) are those in memory."""
        self._suffixes[:, layer, :, : kv.shape[2]] = kv
        self.lengths[layer] = tokens

    def pages(self, group_pages: int) -> NDArray[np.int64]:
        """All pages of the sequence, but for those of its partial group."""
        tokens = [table.pages.reshape(-1, 1) + np.arange(group_pages) for table in self.tokens]
        return np.concatenate([*map(np.ravel, tokens), *(table.pages.ravel() for table in self.index)])
