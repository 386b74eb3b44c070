"""What the host reads of one sequence's heads: index rows, and K and V of token groups."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attend.codeword import CODEWORD_BYTES, PageKind
from nearflash.inference.index_rows import IndexMemory, IndexRows, rows_of_pages
from nearflash.storage.flash.page import PageData, PageKeys, page_keys
from nearflash.storage.kv import KvStore, StoredHead

__all__ = ["Groups", "SequenceReads"]

Bools = NDArray[np.bool_]
F16 = NDArray[np.float16]
Ints = NDArray[np.int64]
Read = Callable[[PageKind, Ints, PageKeys], PageData]


@dataclass(frozen=True)
class Groups:
    """Full token groups, by head."""

    number: list[Ints]
    """Which groups, rising."""
    data: list[F16]
    """Their pages, (groups, elements of a group's pages)."""


class SequenceReads:
    """Reads of some heads of one (sequence, layer), by `read`, which counts them."""

    def __init__(self, store: KvStore, stored: StoredHead, heads: list[int], read: Read) -> None:
        self._store, self._read = store, read
        self.stored, self.heads, self.tokens = stored, heads, stored.tokens

    def groups(self, wanted: Bools, *, values: bool = True) -> Groups:
        """The `wanted` (heads, full groups), their V too where `values`."""
        layout, owner = self._store.layout, self.stored.owner
        rows, number = np.nonzero(wanted)
        parts = np.arange(layout.group_pages if values else 1)
        pages = self.stored.token_pages[np.array(self.heads)[rows], number][:, None] + parts
        first = parts * (layout.page_bytes // CODEWORD_BYTES)
        heads = np.array(self.heads)[rows][:, None]
        keys = page_keys(owner.sequence, owner.layer, heads, number[:, None], PageKind.TOKEN, first)
        data = self._read(PageKind.TOKEN, pages.reshape(-1), keys.reshape(-1)).data
        ends = np.cumsum(wanted.sum(axis=1))[:-1]
        places = data.reshape(len(number), len(parts) * layout.page_bytes).view(np.float16)
        return Groups(np.split(number, ends), np.split(places, ends))

    def index(self, channels: Ints, memory: IndexMemory) -> IndexRows:
        """Rows of all whole blocks over `channels` (heads, r)."""
        owner, blocks = self.stored.owner, self.tokens // self._store.layout.block_tokens
        kept = memory.get(owner.sequence, owner.layer)
        have = kept.codes.shape[1] if kept else 0
        if have < blocks and memory.has_room(self._layer_bytes(blocks - have)):
            new = self._blocks(range(have, blocks))
            kept = kept.with_blocks(new) if kept else new
            memory.put(owner.sequence, owner.layer, kept)
            have = blocks
        if kept is None:
            return self._chosen_rows(channels, range(blocks))
        rows = kept.of(self.heads, channels)
        return rows if have == blocks else rows.with_blocks(self._chosen_rows(channels, range(have, blocks)))

    def tail(self) -> F16:
        """K (heads, t, d) of the tokens behind the whole blocks."""
        layout = self._store.layout
        full = self.stored.flash_tokens // layout.group_tokens
        first = self.tokens // layout.block_tokens * layout.block_tokens // layout.group_tokens
        wanted = np.broadcast_to(np.arange(full) >= first, (len(self.heads), full))
        own = self.stored.tail_k[self.heads]
        if first >= full:
            return own
        data = np.stack(self.groups(wanted, values=False).data)
        k = self._store.pages.k_values(data.reshape(-1, data.shape[-1]).view(np.uint8))
        return np.concatenate([k.reshape(*own.shape[:1], -1, own.shape[-1]), own], axis=1)

    def _layer_bytes(self, blocks: int) -> int:
        layout = self._store.pages.index_layout
        row_bytes = layout.block_tokens * layout.format.bits // 8 + 4
        return self._store.shape.kv_heads * blocks * layout.dim * row_bytes

    def _blocks(self, blocks: range) -> IndexRows:
        """All rows of all of the layer's heads."""
        heads, layout = np.arange(self._store.shape.kv_heads), self._store.pages.index_layout
        indices = np.arange(blocks.start * layout.pages, blocks.stop * layout.pages)
        every, pages = (x.reshape(-1) for x in np.meshgrid(heads, indices, indexing="ij"))
        return rows_of_pages(self._index_pages(every, pages), layout, len(heads))

    def _chosen_rows(self, channels: Ints, blocks: range) -> IndexRows:
        """Rows over `channels` (heads, r), from the pages that hold one of them."""
        layout = self._store.pages.index_layout
        page, line = np.divmod(channels, layout.rows)
        wanted = np.zeros((len(self.heads), len(blocks), layout.pages), bool)
        np.put_along_axis(wanted, np.repeat(page[:, None], len(blocks), axis=1), True, axis=2)
        slots = (np.cumsum(wanted.reshape(-1)) - 1).reshape(wanted.shape)
        rows, block, place = np.nonzero(wanted)
        read = self._index_pages(np.array(self.heads)[rows], (block + blocks.start) * layout.pages + place)
        slot = np.take_along_axis(slots, np.repeat(page[:, None], len(blocks), axis=1), axis=2)
        lines, size = line[:, None], layout.block_tokens * layout.format.bits // 8
        data = read.data[:, : layout.rows * layout.stride_bytes].reshape(-1, layout.rows, layout.stride_bytes)
        factors = np.ascontiguousarray(read.aux[slot, lines * layout.row_codewords, :4]).view(np.float16)
        return IndexRows(data[..., :size][slot, lines], factors)

    def _index_pages(self, heads: Ints, indices: Ints) -> PageData:
        owner = self.stored.owner
        keys = page_keys(owner.sequence, owner.layer, heads, indices, PageKind.INDEX)
        return self._read(PageKind.INDEX, self.stored.index_pages[heads, indices], keys)
