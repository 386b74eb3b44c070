"""A store's sequences from the pages of its flash and the journal: what was programmed before it was closed, or died.

Pages are found by their headers. A sequence has the tokens of the leading KV page groups that are there in every layer
and head; after a crash a page counts that was read and is valid. What has no place in a sequence is dead.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.codeword import PageKind
from nearflash.abi.errors import CommandError
from nearflash.storage.flash.base import Flash
from nearflash.storage.flash.file import FileFlash
from nearflash.storage.flash.geometry import PageNumbers
from nearflash.storage.flash.page import PageKeys
from nearflash.storage.kv.layout import KvLayout, KvShape
from nearflash.storage.kv.sequence import Tags

__all__ = ["FoundPages"]

_READ_BYTES = 64 << 20
"""Pages that are read at once to see whether they are valid."""
_NONE = -1
_NO_BLOCKS = np.zeros(0, np.int64)


@dataclass(frozen=True)
class _Kind:
    """Pages of a kind, sorted by the number that they go by."""

    keys: PageKeys
    pages: PageNumbers


class FoundPages:
    """The pages of a flash by sequence number, layer, head and index.

    verify: read them all, and leave out what is not valid. Raises CommandError for a flash whose pages have no headers
    that outlast its user, StateError where it cannot be read.
    """

    def __init__(self, flash: Flash, shape: KvShape, layout: KvLayout, *, verify: bool) -> None:
        if not isinstance(flash, FileFlash):
            raise CommandError(f"sequences must be kept on a flash in a file, not on {type(flash).__name__}")
        self._shape, self._layout = shape, layout
        geometry = flash.geometry
        pages = np.arange(geometry.pages)
        keys, known, erased = flash.headers(pages)
        known &= (keys["kind"] < len(PageKind)) & (keys["layer"] < shape.layers) & (keys["head"] < shape.kv_heads)
        self.numbers = set(np.unique(keys["sequence"][known]).tolist())
        """By which pages go."""
        self.keys = keys
        """Of every page, those of V of separate groups with their first codeword."""
        odd = pages % layout.group_pages == 1
        keys["first"][known & odd & (keys["kind"] == PageKind.TOKEN)] = layout.page_codewords
        self.has_torn = False
        """Pages with a header are not valid: only who reads them tells them from others of the same key."""
        if verify:
            valid = _valid(flash, pages[known], keys[known])
            self.has_torn, known[known] = not valid.all(), valid
        places = (~erased).reshape(geometry.blocks, -1) * np.arange(1, geometry.pages_per_block + 1)
        self.ends = places.max(axis=1)
        """Pages of each block that have been programmed, or lie before one that was."""
        self._geometry = geometry
        first = np.where(known, keys["kind"], len(PageKind)).reshape(geometry.blocks, -1).min(axis=1)
        self.kinds = np.where(first == len(PageKind), int(PageKind.TOKEN), first)
        """Of each block's pages, where it has any."""
        whole = known & (keys["kind"] == PageKind.TOKEN)
        if layout.group_pages == 2:
            whole[:-1] &= ~odd[:-1] & whole[1:] & _alike(keys[:-1], keys[1:])
            whole[-1] = False
        self._kinds = {
            kind: _sort(keys[of_kind], pages[of_kind])
            for kind, of_kind in ((PageKind.TOKEN, whole), (PageKind.INDEX, known & (keys["kind"] == PageKind.INDEX)))
        }

    def redundant_blocks(self, live: PageNumbers) -> NDArray[np.int64]:
        """A block of each LUN queue that has none free or dead: one whose `live` pages all have copies elsewhere.

        Where garbage collection was cut off, between the copies and the erase, there is one.
        """
        blocks, queues = self._geometry.blocks, self._geometry.lun_queues
        live = np.unique(live)  # forks share pages
        lost, spare = np.zeros(blocks, np.int64), self.ends == 0
        np.add.at(lost, live // self._geometry.pages_per_block, 1)
        spare |= lost == 0
        for kind in self._kinds.values():
            _, inverse, counts = np.unique(kind.keys, return_inverse=True, return_counts=True)
            copied = np.intersect1d(live, kind.pages[counts[inverse] > 1])
            np.subtract.at(lost, copied // self._geometry.pages_per_block, 1)
        full = [queue for queue in range(queues) if not spare[queue::queues].any()]
        moves = (np.flatnonzero(lost[queue::queues] == 0)[:1] * queues + queue for queue in full)
        return np.concatenate([np.zeros(0, np.int64), *moves])

    def group(self, number: int, index: int, avoid: NDArray[np.int64] = _NO_BLOCKS) -> NDArray[np.int64] | None:
        """The pages (layers, heads) of the KV page group `index` that goes by `number`; None where one is missing.

        Of separate groups K's page; of pages that are there twice one that is not in `avoid`.
        """
        keys, pages = self._of(PageKind.TOKEN, number, avoid)
        of_index = keys["index"] == index
        table = np.full((self._shape.layers, self._shape.kv_heads), _NONE)
        table[keys["layer"][of_index], keys["head"][of_index]] = pages[of_index]
        return None if (table == _NONE).any() else table

    def tables(self, kind: PageKind, tags: Tags, avoid: NDArray[np.int64] = _NO_BLOCKS) -> list[PageNumbers]:
        """The pages of a sequence that goes by `tags`: of each layer (heads, leading page indices that all heads have).

        Of separate groups K's page, of index blocks every page; of pages that are there twice not those in `avoid`.
        """
        per_block = self._layout.index_layout(self._shape.dim).pages if kind is PageKind.INDEX else 1
        ends, parts = [*tags.starts[1:], None], []
        for start, number, end in zip(tags.starts, tags.numbers, ends, strict=True):
            keys, pages = self._of(kind, number, avoid)
            index = keys["index"].astype(np.int64)
            inside = (index >= start * per_block) & (index < (np.inf if end is None else end * per_block))
            parts.append((keys[inside], pages[inside]))
        keys, pages = (np.concatenate([part[side] for part in parts]) for side in (0, 1))
        # Bad headers must not decide how large the table is: no index can be above the number of pages.
        count = min(int(keys["index"].max(initial=0)) + 1, len(pages)) if len(keys) else 0
        near = keys["index"] < count
        table = np.full((self._shape.layers, self._shape.kv_heads, count), _NONE)
        table[keys["layer"][near], keys["head"][near], keys["index"][near]] = pages[near]
        leading = np.logical_and.accumulate((table != _NONE).all(axis=1), axis=1).sum(axis=1)
        return [table[layer, :, : leading[layer] // per_block * per_block] for layer in range(self._shape.layers)]

    def _of(self, kind: PageKind, number: int, avoid: NDArray[np.int64]) -> tuple[PageKeys, PageNumbers]:
        """Keys and pages of a kind that go by a number, those in the blocks to `avoid` first: a later one takes a
        place from an earlier one."""
        kept = self._kinds[kind]
        span = slice(*np.searchsorted(kept.keys["sequence"], [number, number + 1]))
        keys, pages = kept.keys[span], kept.pages[span]
        later = np.argsort(~np.isin(pages // self._geometry.pages_per_block, avoid), kind="stable")
        return keys[later], pages[later]


def _valid(flash: FileFlash, pages: PageNumbers, keys: PageKeys) -> NDArray[np.bool_]:
    step = max(_READ_BYTES // flash.geometry.page_bytes, 1)
    parts = [flash.valid(pages[at : at + step], keys[at : at + step]) for at in range(0, len(pages), step)]
    return np.concatenate([np.zeros(0, bool), *parts])


def _alike(keys: PageKeys, others: PageKeys) -> NDArray[np.bool_]:
    """Which pages are of one group."""
    same = np.ones(len(keys), bool)
    for name in ("sequence", "layer", "head", "index", "kind"):
        same &= keys[name] == others[name]
    return same


def _sort(keys: PageKeys, pages: PageNumbers) -> _Kind:
    order = np.argsort(keys["sequence"], kind="stable")
    return _Kind(keys[order], pages[order])
