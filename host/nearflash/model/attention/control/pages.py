"""A head's index, K and V read from its pages, as the kernel reads them: only what is wanted, and nothing unchecked.

What a misdirected codeword holds is computed with, as the channels do; its fault keeps the result from being used.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.codeword import CODEWORD_BYTES, PageKind, PageTag
from nearflash.abi.attention.faults import Fault
from nearflash.abi.attention.pages import IndexFormat
from nearflash.model.attention.memory.index import IndexBlock, QuantisedBlock
from nearflash.model.attention.memory.settings import HeadSettings
from nearflash.model.attention.memory.traffic import group_codewords
from nearflash.model.nand.codeword import check

__all__ = ["PageReader", "PageSource", "PagesRead"]

Bools = NDArray[np.bool_]
Bytes = NDArray[np.uint8]
Entries = NDArray[np.uint64]
F16 = NDArray[np.float16]
Ints = NDArray[np.int64]
_CHANNEL_SHIFT = np.uint64(48)
_CHANNEL_MASK = np.uint64(0xFF)


class PageReader(Protocol):
    """Source of pages."""

    def legal(self, entries: Entries) -> Bools:
        """Whether there is such a place, (P,)."""

    def read(self, entries: Entries, pages: int, codewords: int) -> tuple[Bytes, Bools]:
        """Sealed codewords (P, pages·codewords, 528) of one page each, or K's and V's; which are uncorrectable."""


@dataclass
class PagesRead:
    """Requests that a source has made."""

    index_requests: int = 0
    token_requests: int = 0
    codewords: int = 0
    """Asked for."""
    uncorrectable: int = 0
    misdirected: int = 0

    @property
    def requests(self) -> int:
        """Page requests, of a separate group's two pages one."""
        return self.index_requests + self.token_requests


class PageSource:
    """A Source (source.py) over the pages that a head's tables name, S = `tokens` tokens."""

    def __init__(
        self, settings: HeadSettings, page_tag: PageTag, tokens: int, index_table: Entries, token_table: Entries,
        reader: PageReader,
    ) -> None:  # fmt: skip
        self.tokens = tokens
        self.faults = Fault(0)
        self.read = PagesRead()
        self._settings, self._page_tag, self._reader = settings, page_tag, reader
        self._index_table, self._token_table = index_table, token_table

    def blocks(self, dims: Ints) -> list[IndexBlock]:
        """The index over `dims` (r,), a block a codeword of a row."""
        covered = self._settings.count_scanned(self.tokens)
        if not covered:
            return []
        layout = self._settings.index_layout
        pages, page_of = np.unique(dims // layout.rows, return_inverse=True)
        wanted = np.zeros((len(pages), layout.page_bytes // CODEWORD_BYTES), bool)
        rows = wanted[:, : layout.rows * layout.row_codewords].reshape(len(pages), layout.rows, -1)
        rows[page_of, dims % layout.rows] = True
        count = covered // layout.block_tokens
        table = self._index_table.reshape(count, layout.pages)[:, pages]
        whole = self._readable_blocks(table)
        indices = np.arange(whole)[:, None] * layout.pages + pages
        data, aux = self._pages(
            table[:whole].reshape(-1), indices.reshape(-1), PageKind.INDEX, np.tile(wanted, (whole, 1))
        )
        shape = (whole, len(pages), layout.rows, layout.row_codewords)
        used = layout.rows * layout.row_codewords
        data = data[:, :used].reshape(*shape, CODEWORD_BYTES)[:, page_of, dims % layout.rows]
        aux = aux[:, :used].reshape(*shape, 8)[:, page_of, dims % layout.rows]
        factors = np.ascontiguousarray(aux[..., :4]).view(np.float16)
        return [
            self._block(data[block, :, part], factors[block, :, part], part)
            for block in range(whole)
            for part in range(layout.row_codewords)
        ]

    def suffix(self, dims: Ints) -> F16:
        """K (t, r) of the tokens after the index."""
        wanted = np.arange(self.tokens) >= self._settings.count_scanned(self.tokens)
        return self._tokens(wanted, values=(False,))[0][:, dims]

    def read_chosen(self, mask: Bools) -> tuple[F16, F16]:
        """K and V (|J|, d)."""
        return self._tokens(mask, values=(False, True))

    def _readable_blocks(self, table: Entries) -> int:
        """Blocks whose pages all have a place, on one channel; with the first other one the walk ends."""
        channels = table >> _CHANNEL_SHIFT & _CHANNEL_MASK
        good = (self._reader.legal(table) & (channels == channels[:, :1])).all(axis=1)
        if good.all():
            return len(good)
        self.faults |= Fault.ENTRY
        return int(np.argmin(good))

    def _block(self, data: Bytes, factors: F16, part: int) -> IndexBlock:
        """A codeword's tokens: `data` (r, 512), scale and zero (r, 2)."""
        form = self._settings.index_format
        per_codeword = 8 * CODEWORD_BYTES // form.bits
        tokens = min(per_codeword, self._settings.block_tokens - part * per_codeword)
        if form is IndexFormat.FP16:
            return np.ascontiguousarray(data).view(np.float16)[:, :tokens].T
        if form is IndexFormat.INT4:
            data = np.stack([data & 15, data >> 4], axis=-1).reshape(len(data), -1)
        return QuantisedBlock(data[:, :tokens].T, factors[:, 0], factors[:, 1], form)

    def _tokens(self, wanted: Bools, values: tuple[bool, ...]) -> tuple[F16, F16]:
        """K and V of the tokens `wanted` (S,) whose groups have a place."""
        layout, n = self._settings.token_layout, self._settings.group_tokens
        groups = np.zeros((-(-self.tokens // n), n), bool)
        groups.reshape(-1)[: self.tokens] = wanted
        numbers = np.flatnonzero(groups.any(axis=1))
        good = self._reader.legal(self._token_table[numbers])
        if not good.all():
            self.faults |= Fault.ENTRY
            numbers = numbers[: np.argmin(good)]
        asked = group_codewords(layout, groups[numbers], values)
        data, _ = self._pages(self._token_table[numbers], numbers, PageKind.TOKEN, asked)
        elements = np.ascontiguousarray(data).reshape(-1, layout.pages, layout.page_bytes).view(np.float16)
        pairs = (len(numbers), n, 2, layout.dim) if layout.interleaved else (len(numbers), 2, n, layout.dim)
        used = elements[:, :, : n * layout.dim * 2 // layout.pages].reshape(pairs)
        k, v = np.moveaxis(used, 2 if layout.interleaved else 1, 0)
        return k[groups[numbers]], v[groups[numbers]]

    def _pages(self, entries: Entries, indices: Ints, kind: PageKind, wanted: Bools) -> tuple[Bytes, Bytes]:
        """Data (P, codewords, 512) and aux (P, codewords, 8); only those `wanted` (P, codewords) are validated."""
        per_page = self._settings.page_bytes // CODEWORD_BYTES
        sealed, lost = self._reader.read(entries, wanted.shape[1] // per_page, per_page)
        checked = check(sealed, self._page_tag, indices, kind)
        lost, misdirected = lost & wanted, checked.misdirected & wanted & ~lost
        for mark, fault in ((lost, Fault.UNCORRECTABLE), (misdirected, Fault.MISDIRECTED)):
            if mark.any():
                self.faults |= fault
        if kind is PageKind.INDEX:
            self.read.index_requests += len(entries)
        else:
            self.read.token_requests += len(entries)
        self.read.codewords += int(wanted.sum())
        self.read.uncorrectable += int(lost.sum())
        self.read.misdirected += int(misdirected.sum())
        return checked.data, checked.aux
