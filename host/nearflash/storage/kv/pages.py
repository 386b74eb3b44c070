"""Pages of full KV page groups and index blocks of one layer, for all heads at once, and K and V out of pages."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearflash.abi.attention.codeword import PageKind
from nearflash.abi.attention.pages import IndexFormat
from nearflash.storage.flash.page import PageKeys, PageWrites, page_array, page_headers, page_keys
from nearflash.storage.kv.index import index_rows
from nearflash.storage.kv.layout import KvLayout, KvShape

__all__ = ["PageMaker"]

F16 = NDArray[np.float16]
_SCALES = slice(0, 4)
_HEADER = slice(4, 8)


class PageMaker:
    """Makes and reads pages. Raises CommandError where the layout does not fit the shape."""

    def __init__(self, shape: KvShape, layout: KvLayout) -> None:
        self.shape, self.layout = shape, layout
        self.index_layout = layout.index_layout(shape.dim)
        layout.token_layout(shape.dim)

    def token_keys(self, tags: ArrayLike, layer: int, groups: range) -> PageKeys:
        """(heads, groups, pages of a group); tags: the number that each group's pages go by, or one for all."""
        first = np.arange(self.layout.group_pages) * self.layout.page_codewords
        heads = np.arange(self.shape.kv_heads)[:, None, None]
        return page_keys(_column(tags), layer, heads, np.asarray(groups)[:, None], PageKind.TOKEN, first)

    def index_keys(self, tags: ArrayLike, layer: int, blocks: range) -> PageKeys:
        """(heads, blocks, pages of a block); tags: the number that each block's pages go by, or one for all."""
        pages = self.index_layout.pages
        heads, indices = np.arange(self.shape.kv_heads), np.arange(blocks.start * pages, blocks.stop * pages)
        return page_keys(_column(tags), layer, heads[:, None, None], indices.reshape(-1, pages), PageKind.INDEX)

    def token_pages(self, keys: PageKeys, k: F16, v: F16) -> PageWrites:
        """Pages of full groups: k and v (heads, groups·n, d); in the order of `keys`, as token_keys gives them."""
        heads, groups, _ = keys.shape
        n, dim = self.layout.group_tokens, self.shape.dim
        data = page_array(keys.size, self.layout.page_bytes)
        places = data.reshape(heads, groups, self.layout.group_pages * self.layout.page_bytes).view(np.float16)
        for value, source in enumerate((k, v)):
            self._values(places, value)[:] = source.reshape(heads, groups, n, dim)
        flat = keys.reshape(-1)
        aux = np.zeros((len(flat), self.layout.page_codewords, 8), np.uint8)
        aux[..., _HEADER] = page_headers(flat, self.layout.page_bytes, n, IndexFormat.FP16)
        return PageWrites(flat, data, aux)

    def values(self, data: NDArray[np.uint8]) -> F16:
        """K and V (2, groups, n, d) of full groups, their pages one after the other: (pages, page_bytes)."""
        places = data.reshape(-1, self.layout.group_pages * self.layout.page_bytes).view(np.float16)
        return np.stack([self._values(places, value) for value in (0, 1)])

    def k_values(self, data: NDArray[np.uint8]) -> F16:
        """k (groups, n, d), a view into the first pages of full groups, (groups, page_bytes)."""
        return self._values(data.view(np.float16), 0)

    def index_pages(self, keys: PageKeys, k: F16) -> PageWrites:
        """Pages of index blocks: k (heads, blocks·T, d); in the order of `keys`, as index_keys gives them."""
        heads, blocks, pages = keys.shape
        layout, count = self.index_layout, heads * blocks
        rows, factors = index_rows(k.reshape(count, layout.block_tokens, layout.dim), layout)
        # The last page of a block may have fewer rows than the others.
        lines = np.zeros((count, pages * layout.rows, layout.stride_bytes), np.uint8)
        lines[:, : layout.dim, : rows.shape[2]] = rows
        scales = np.zeros((count, pages * layout.rows, layout.row_codewords, 4), np.uint8)
        scales[:, : layout.dim] = factors.view(np.uint8).reshape(count, layout.dim, 1, 4)
        flat, data = keys.reshape(-1), page_array(keys.size, layout.page_bytes)
        data[:, : layout.rows * layout.stride_bytes] = lines.reshape(keys.size, layout.rows * layout.stride_bytes)
        aux = np.zeros((keys.size, self.layout.page_codewords, 8), np.uint8)
        aux[..., _HEADER] = page_headers(flat, layout.page_bytes, layout.block_tokens, layout.format)
        used = layout.rows * layout.row_codewords
        aux[:, :used, _SCALES] = scales.reshape(keys.size, used, 4)
        return PageWrites(flat, data, aux)

    def _values(self, places: F16, value: int) -> F16:
        """The view (…, n, d) of K (value 0) or V (1) in groups (…, elements of a group)."""
        n, dim = self.layout.group_tokens, self.shape.dim
        if self.layout.interleaved:
            return places[..., : 2 * n * dim].reshape(*places.shape[:-1], n, 2, dim)[..., value, :]
        start = value * self.layout.page_bytes // 2
        return places[..., start : start + n * dim].reshape(*places.shape[:-1], n, dim)


def _column(tags: ArrayLike) -> NDArray[np.int64]:
    return np.asarray(tags, np.int64).reshape(-1, 1)
