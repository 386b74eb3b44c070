"""The host's reads of one sequence's heads: index rows, and K and V of KV page groups."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.codeword import CODEWORD_BYTES, PageKind
from nearflash.inference.engines.paged.ahead import AheadGroups, ReadAhead
from nearflash.inference.engines.paged.index_rows import IndexCache, IndexRows, rows_bytes, rows_of_pages
from nearflash.inference.engines.paged.page_cache import Found, PageCache
from nearflash.storage.flash.page import PageData, PageKeys, page_keys
from nearflash.storage.kv import KvStore, StoredHead

__all__ = ["Groups", "SequenceReads"]

Bools = NDArray[np.bool_]
F16 = NDArray[np.float16]
Ints = NDArray[np.int64]
Read = Callable[[PageKind, Ints, PageKeys], PageData]
_R = TypeVar("_R")


@dataclass(frozen=True)
class Groups:
    """Full KV page groups of heads."""

    number: Ints
    """Which groups, of one head behind those of the other, rising."""
    ends: Ints
    """Of each head's in `number` and `places`, (heads,)."""
    places: Ints
    """Of each: its row in `kept`, or -1 - its row in `new` and, behind it, `late`."""
    kept: F16
    """Pages in memory, (rows, elements of a group's pages)."""
    new: F16
    late: F16

    def compact(self) -> "Groups":
        """The same, with these groups alone in `new`, in their order, and none in `late`."""
        fresh = self.places < 0
        rows, places = -1 - self.places[fresh], self.places.copy()
        new, places[fresh] = ReadAhead(rows, self.new, self.late).join(), -1 - np.arange(len(rows))
        return replace(self, places=places, new=new, late=new[:0])

    def gather(self) -> F16:
        """All of them, where they are compact, (groups, elements)."""
        if (self.places < 0).all():
            return self.new[-1 - self.places]
        data = self.kept[np.maximum(self.places, 0)]
        read = self.places < 0
        data[read] = self.new[-1 - self.places[read]]
        return data


class SequenceReads:
    """Reads of some heads of one (sequence, layer), by `read`, which counts them; ahead: of all heads."""

    def __init__(
        self, store: KvStore, stored: StoredHead, heads: list[int], read: Read, ahead: AheadGroups | None = None
    ) -> None:
        self._store, self._read, self.ahead = store, read, ahead
        self.stored, self.heads, self.tokens = stored, heads, stored.tokens

    def groups(self, ask: Callable[..., Future], wanted: Bools, memory: PageCache, first: int = 0) -> Future[Groups]:
        """The `wanted` (heads, full groups from `first` on), compact.

        What is not in memory is read where `ask` has it done.
        """
        found = self.use_groups(ask, wanted, memory, first, Groups.compact)
        if isinstance(found, Future):
            return found
        done = Future[Groups]()
        done.set_result(found)
        return done

    def use_groups(
        self, ask: Callable[..., Future], wanted: Bools, memory: PageCache, first: int, use: Callable[[Groups], _R]
    ) -> Groups | Future[_R]:
        """The same at once where all are in memory; else what `use` makes of them, called by the thread that reads."""
        rows, number = np.nonzero(wanted)
        number += first
        heads = np.array(self.heads, np.int64)[rows]
        places = memory.find(self.stored.sequence, self.stored.page_tag.layer, heads, number)
        ends = np.cumsum(wanted.sum(axis=1))
        if len(lacking := places.lacking):
            return ask(self._fill, memory, places, ends, lacking, use)
        return Groups(number, ends, places.places, memory.data, memory.data[:0], memory.data[:0])

    def _fill(self, memory: PageCache, found: Found, ends: Ints, lacking: Ints, use: Callable[[Groups], _R]) -> _R:
        own = found.heads[lacking], found.groups[lacking]
        if self.ahead is None:
            new = self.read_groups(*own)
        else:
            taken = self.ahead.take(*own, self.read_groups)
            if not memory.keeps:
                return use(Groups(found.groups, ends, -1 - taken.rows, memory.data, taken.early, taken.late))
            new = taken.join()
        return use(Groups(found.groups, ends, memory.fill(found, new), memory.data, new, new[:0]))

    @staticmethod
    def read_together(groups: Sequence[tuple["SequenceReads", Ints, Ints]]) -> F16:
        """Groups of several sequences, each with its heads and numbers (n,), by one read: (all n, elements)."""
        reads = groups[0][0]
        size = reads._store.layout.group_pages
        places, keys = zip(*(own._pages_of(heads, number, size) for own, heads, number in groups), strict=True)
        data = reads._read(PageKind.TOKEN, np.concatenate(places), np.concatenate(keys)).data
        return data.view(np.float16).reshape(-1, size * reads._store.layout.page_bytes // 2)

    def read_groups(self, heads: Ints, number: Ints) -> F16:
        """Groups (n,), all their pages, (n, elements)."""
        return self._groups(heads, number, self._store.layout.group_pages)

    def find_index(self, memory: IndexCache) -> IndexRows | None:
        """Rows of all dims and all whole blocks, where they are in memory."""
        kept = memory.get(self.stored.sequence, self.stored.page_tag.layer)
        if kept is None or kept.codes.shape[1] < self.tokens // self._store.layout.block_tokens:
            return None
        return kept.of(self.heads)

    def index(self, dims: Ints, memory: IndexCache) -> tuple[IndexRows, Ints]:
        """Rows of all whole blocks, and which of them are those over `dims` (heads, r)."""
        key, blocks = (self.stored.sequence, self.stored.page_tag.layer), self.tokens // self._store.layout.block_tokens
        kept = memory.get(*key)
        have = kept.codes.shape[1] if kept else 0
        pages, heads = self._store.pages.index_layout, self._store.shape.kv_heads
        if have < blocks and memory.has_room(rows_bytes(pages, heads, blocks - have)):
            new = self.blocks(range(have, blocks))
            kept = kept.with_blocks(new) if kept else new
            memory.put(*key, kept)
            have = blocks
        if kept is not None and have == blocks:
            return kept.of(self.heads), dims
        places = np.broadcast_to(np.arange(dims.shape[1]), dims.shape)
        rows = self._read_rows(dims, range(have, blocks))
        return (rows if kept is None else kept.over(self.heads, dims).with_blocks(rows)), places

    @property
    def suffix_kept(self) -> bool:
        """`suffix` is all in memory."""
        return self._unindexed.start >= self._unindexed.stop

    @property
    def _unindexed(self) -> range:
        """Full groups after the whole index blocks."""
        layout = self._store.layout
        blocks = self.tokens // layout.block_tokens
        return range(
            blocks * layout.block_tokens // layout.group_tokens, self.stored.flash_tokens // layout.group_tokens
        )

    def suffix(self) -> F16:
        """K (heads, t, d) of the tokens after the whole blocks, each head's together; no copy where heads follow each
        other and all are in memory.
        """
        first, end = self.heads[0], self.heads[-1] + 1
        adjacent = end - first == len(self.heads)  # they rise
        suffix = self.stored.suffix_k[first:end] if adjacent else self.stored.suffix_k[self.heads]
        return suffix if self.suffix_kept else np.concatenate([self._keys(self._unindexed), suffix], axis=1)

    def keys(self, blocks: range) -> F16:
        """K (heads, t, d) of whole index blocks."""
        each = self._store.layout.block_tokens // self._store.layout.group_tokens
        return self._keys(range(blocks.start * each, blocks.stop * each))

    def _keys(self, groups: range) -> F16:
        """K (heads, t, d) of full groups."""
        heads, number = (x.reshape(-1) for x in np.meshgrid(self.heads, groups, indexing="ij"))
        k = self._store.pages.k_values(self._groups(heads, number, 1).view(np.uint8))
        return k.reshape(len(self.heads), -1, k.shape[-1])

    def _groups(self, heads: Ints, number: Ints, pages: int) -> F16:
        """The first `pages` pages of groups (n,), (n, elements)."""
        data = self._read(PageKind.TOKEN, *self._pages_of(heads, number, pages)).data
        return data.reshape(len(number), pages * self._store.layout.page_bytes).view(np.float16)

    def _pages_of(self, heads: Ints, number: Ints, pages: int) -> tuple[Ints, PageKeys]:
        """The first `pages` pages of groups (n,), and their keys, (n · pages,)."""
        layer, layout, parts = self.stored.page_tag.layer, self._store.layout, np.arange(pages)
        first = parts * (layout.page_bytes // CODEWORD_BYTES)
        tags = self.stored.token_tags[number][:, None]
        keys = page_keys(tags, layer, heads[:, None], number[:, None], PageKind.TOKEN, first)
        places = self.stored.token_pages[heads, number][:, None] + parts
        return places.reshape(-1), keys.reshape(-1)

    def blocks(self, blocks: range) -> IndexRows:
        """All rows of whole index blocks, of all of the layer's heads."""
        heads, layout = np.arange(self._store.shape.kv_heads), self._store.pages.index_layout
        indices = np.arange(blocks.start * layout.pages, blocks.stop * layout.pages)
        every, pages = (x.reshape(-1) for x in np.meshgrid(heads, indices, indexing="ij"))
        return rows_of_pages(self._index_pages(every, pages), layout, len(heads))

    def _read_rows(self, dims: Ints, blocks: range) -> IndexRows:
        """Rows over `dims` (heads, r), from the pages that hold one of them."""
        layout = self._store.pages.index_layout
        page, line = np.divmod(dims, layout.rows)
        wanted = np.zeros((len(self.heads), len(blocks), layout.pages), bool)
        np.put_along_axis(wanted, np.repeat(page[:, None], len(blocks), axis=1), True, axis=2)
        slots = (np.cumsum(wanted.reshape(-1)) - 1).reshape(wanted.shape)
        rows, block, page_in_block = np.nonzero(wanted)
        read = self._index_pages(np.array(self.heads)[rows], (block + blocks.start) * layout.pages + page_in_block)
        slot = np.take_along_axis(slots, np.repeat(page[:, None], len(blocks), axis=1), axis=2)
        lines, size = line[:, None], layout.block_tokens * layout.format.bits // 8
        data = read.data[:, : layout.rows * layout.stride_bytes].reshape(-1, layout.rows, layout.stride_bytes)
        factors = np.ascontiguousarray(read.aux[slot, lines * layout.row_codewords, :4]).view(np.float16)
        return IndexRows(data[..., :size][slot, lines], factors)

    def _index_pages(self, heads: Ints, indices: Ints) -> PageData:
        tags = self.stored.index_tags[indices // self._store.pages.index_layout.pages]
        keys = page_keys(tags, self.stored.page_tag.layer, heads, indices, PageKind.INDEX)
        return self._read(PageKind.INDEX, self.stored.index_pages[heads, indices], keys)
