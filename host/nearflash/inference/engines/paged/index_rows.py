"""Rows of the index over the dims of a scan: where they lie in pages, and what is kept of them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.pages import IndexLayout
from nearflash.storage.flash.page import PageData

__all__ = ["IndexCache", "IndexRows", "rows_bytes", "rows_of_pages"]

Bytes = NDArray[np.uint8]
F16 = NDArray[np.float16]


@dataclass(frozen=True)
class IndexRows:
    """Rows of H heads, B whole blocks, r dims each."""

    codes: Bytes
    """(H, B, r, T·bits/8)."""
    factors: F16
    """Scale and zero, (H, B, r, 2); of the fp16 index zeros."""

    @property
    def size_bytes(self) -> int:
        """Memory that they take."""
        return self.codes.nbytes + self.factors.nbytes

    def of(self, heads: list[int]) -> "IndexRows":
        """The rows of `heads`; views where these follow one another."""
        selected = slice(heads[0], heads[-1] + 1) if heads == list(range(heads[0], heads[-1] + 1)) else heads
        return IndexRows(self.codes[selected], self.factors[selected])

    def over(self, heads: list[int], dims: NDArray[np.int64]) -> "IndexRows":
        """Copies of the rows of `heads` over `dims` (heads, r)."""
        at = np.array(heads)[:, None], slice(None), dims
        codes, factors = np.swapaxes(self.codes[at], 1, 2), np.swapaxes(self.factors[at], 1, 2)
        return IndexRows(np.ascontiguousarray(codes), np.ascontiguousarray(factors))

    def with_blocks(self, other: "IndexRows") -> "IndexRows":
        """These rows and those of later blocks."""
        codes = np.concatenate([self.codes, other.codes], axis=1)
        return IndexRows(codes, np.concatenate([self.factors, other.factors], axis=1))


def rows_bytes(layout: IndexLayout, heads: int, blocks: int) -> int:
    """Memory that the rows of all dims take."""
    return heads * blocks * layout.dim * (layout.block_tokens * layout.format.bits // 8 + 4)


def rows_of_pages(read: PageData, layout: IndexLayout, heads: int) -> IndexRows:
    """Rows of all d dims, of whole blocks' pages as (heads, blocks, pages of a block) lie one after the other."""
    shape = heads, -1, layout.pages * layout.rows
    used, size = layout.rows * layout.stride_bytes, layout.block_tokens * layout.format.bits // 8
    codes = read.data[:, :used].reshape(*shape, layout.stride_bytes)[:, :, : layout.dim, :size]
    aux = read.aux[:, : layout.rows * layout.row_codewords].reshape(*shape, layout.row_codewords, 8)
    factors = np.ascontiguousarray(aux[:, :, : layout.dim, 0, :4]).view(np.float16)
    return IndexRows(np.ascontiguousarray(codes), factors)


class IndexCache:
    """Rows of all dims kept in memory, up to `limit_bytes`, by (sequence, layer)."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self._kept: dict[tuple[int, int], IndexRows] = {}

    def get(self, sequence: int, layer: int) -> IndexRows | None:
        """The rows that are kept of a layer; they may lack the last blocks."""
        return self._kept.get((sequence, layer))

    def has_room(self, size_bytes: int) -> bool:
        """Whether so much more fits."""
        return self.size_bytes + size_bytes <= self.limit_bytes

    def put(self, sequence: int, layer: int, rows: IndexRows) -> None:
        """Keep these rows in place of those that were kept."""
        before = self._kept.pop((sequence, layer), None)
        self.size_bytes += rows.size_bytes - (before.size_bytes if before else 0)
        self._kept[sequence, layer] = rows

    def truncate(self, sequence: int, blocks: int) -> None:
        """Keep a sequence's first blocks alone."""
        for (number, layer), rows in list(self._kept.items()):
            if number == sequence and rows.codes.shape[1] > blocks:
                self.put(number, layer, IndexRows(rows.codes[:, :blocks].copy(), rows.factors[:, :blocks].copy()))

    def share(self, sequence: int, other: int) -> None:
        """Another sequence has the same blocks; what is kept of them counts once for each."""
        for (number, layer), rows in list(self._kept.items()):
            if number == sequence and self.has_room(rows.size_bytes):
                self.put(other, layer, rows)

    def drop(self, sequence: int) -> None:
        """Forget a sequence."""
        for key in [key for key in self._kept if key[0] == sequence]:
            self.size_bytes -= self._kept.pop(key).size_bytes
