"""Pages of one head: its K and V, and its index, as the bytes that lie in memory or on NAND, and the page tables.

Both layouts of docs/contracts/attention.md, 2. Unused bytes of a page are zero, and all of its codewords are whole.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.codeword import CODEWORD_BYTES, HEADER_MAGIC, SEALED_BYTES, PageKind, PageTag
from nearflash.abi.attention.pages import IndexFormat, IndexLayout, PageEntry
from nearflash.model.attention.memory.index import quantise
from nearflash.model.attention.memory.placement import PageStore
from nearflash.model.attention.memory.settings import HeadSettings
from nearflash.model.nand.codeword import raw_codewords, seal

__all__ = ["HeadImage", "PageImage", "head_image", "image_bytes"]

F16 = NDArray[np.float16]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class PageImage:
    """A page where it lies: sealed codewords at an address of memory, or raw ones at (lun, row) of a channel.

    In memory it is all that one request reads: where K's and V's pages are separate, both.
    """

    entry: PageEntry
    data: bytes
    page_tag: PageTag
    index: int
    kind: PageKind
    second: bool = False
    """V's page of a separate KV page group, on NAND."""


@dataclass(frozen=True)
class HeadImage:
    """All pages of a head, and its tables."""

    pages: tuple[PageImage, ...]
    index_table: NDArray[np.uint64]
    """Page entries of the index pages, by page index; empty where no block is complete."""
    token_table: NDArray[np.uint64]
    """Page entries of the KV page groups (of K's page where K and V are separate)."""

    def copy_to_memory(self, memory: Bytes, base: int) -> None:
        """Copy the pages that lie in memory to `memory`, the bytes at addresses from `base` on."""
        for page in self.pages:
            if page.entry.address is not None:
                start = page.entry.address - base
                memory[start : start + len(page.data)] = np.frombuffer(page.data, np.uint8)

    @property
    def flash_pages(self) -> tuple[PageImage, ...]:
        """The pages that lie on NAND."""
        return tuple(page for page in self.pages if page.entry.address is None)


@dataclass(frozen=True)
class _Page:
    """Data that a page request can read: one page, or K's and V's."""

    kind: PageKind
    index: int
    tokens: int
    """Tokens in it."""
    data: Bytes
    """(codewords, 512)."""
    scales: Bytes
    """Scale and zero, (codewords, 4)."""


def head_image(
    k: F16, v: F16, settings: HeadSettings, page_tag: PageTag, flash: PageStore, *, memory: PageStore | None = None,
    flushed: int | None = None, step: int = 0, turn: int = 0,
) -> HeadImage:  # fmt: skip
    """Pages of k and v (S, d) in the store `flash`; KV page groups from token `flushed` on in `memory`.

    Blocks of the index and KV page groups go round the channels, from the head's number + `turn` on. `flushed` (a
    multiple of the group's tokens; default all) is how far the groups have been written; `step` stands in the page
    headers.
    """
    first = page_tag.head + turn
    flushed = len(k) if flushed is None else flushed
    builder = _Builder(settings, page_tag, step)
    for group, page in enumerate(_token_pages(k, v, settings)):
        unflushed = memory is not None and group * settings.group_tokens >= flushed
        builder.add(page, memory if unflushed and memory else flash, first + group)
    for page in _index_pages(k, settings):
        builder.add(page, flash, first + page.index // settings.index_layout.pages)
    return builder.image()


def image_bytes(settings: HeadSettings, tokens: int) -> int:
    """Bytes that all pages of a head of S = `tokens` tokens take in memory."""
    pages = -(-tokens // settings.group_tokens) * settings.token_layout.pages
    if settings.count_scanned(tokens):
        pages += settings.count_scanned(tokens) // settings.block_tokens * settings.index_layout.pages
    return pages * settings.page_bytes // CODEWORD_BYTES * SEALED_BYTES


@dataclass
class _Builder:
    """Gathers the pages of one page_tag, gives them places, and makes codewords of all of a kind at once."""

    settings: HeadSettings
    page_tag: PageTag
    step: int
    pages: dict[PageKind, list[_Page]] = field(default_factory=lambda: {kind: [] for kind in PageKind})
    entries: dict[PageKind, list[PageEntry]] = field(default_factory=lambda: {kind: [] for kind in PageKind})

    def add(self, page: _Page, store: PageStore, channel: int) -> None:
        """Put a page, or K's and V's, into a store."""
        size = self.settings.page_bytes
        self.pages[page.kind].append(page)
        self.entries[page.kind].append(store.take(channel, page.data.size // size, size))

    def image(self) -> HeadImage:
        """Image of what was added."""
        images = (image for kind in (PageKind.TOKEN, PageKind.INDEX) for image in self._images(kind))
        tables = (np.array([entry.pack() for entry in self.entries[kind]], np.uint64)
                  for kind in (PageKind.INDEX, PageKind.TOKEN))  # fmt: skip
        return HeadImage(tuple(images), *tables)

    def _images(self, kind: PageKind) -> Iterator[PageImage]:
        pages = self.pages[kind]
        if not pages:
            return
        aux = np.stack([np.hstack([page.scales, self._header(page)]) for page in pages])
        data, indices = np.stack([page.data for page in pages]), [page.index for page in pages]
        sealed = seal(self.page_tag, indices, kind, data, aux)
        flash = []
        for entry, index, codewords in zip(self.entries[kind], indices, sealed, strict=True):
            if entry.address is not None:
                yield PageImage(entry, codewords.tobytes(), self.page_tag, index, kind)
                continue
            halves = np.split(codewords, data[0].size // self.settings.page_bytes)
            flash += [(replace(entry, lun=entry.lun ^ i), index, i, half) for i, half in enumerate(halves)]
        if flash:
            places, numbers, seconds, parts = zip(*flash, strict=True)
            rows, luns = ([getattr(entry, name) for entry in places] for name in ("row", "lun"))
            raw = raw_codewords(np.stack(parts), rows, luns)
            for entry, index, second, codewords in zip(places, numbers, seconds, raw, strict=True):
                yield PageImage(entry, codewords.tobytes(), self.page_tag, index, kind, bool(second))

    def _header(self, page: _Page) -> Bytes:
        """The header's word of each codeword, (codewords, 4)."""
        form = self.settings.index_format if page.kind is PageKind.INDEX else IndexFormat.FP16
        size_log2, page_tag = self.settings.page_bytes.bit_length() - 1, self.page_tag
        words = [HEADER_MAGIC, page_tag.sequence, page_tag.layer | page_tag.head << 16,
                 page.kind | form << 8 | size_log2 << 16, page.index, self.step, page.tokens, 0]  # fmt: skip
        return np.resize(np.array(words, "<u4"), len(page.data)).view(np.uint8).reshape(-1, 4)


def _token_pages(k: F16, v: F16, settings: HeadSettings) -> Iterator[_Page]:
    layout, n = settings.token_layout, settings.group_tokens
    for index, start in enumerate(range(0, len(k), n)):
        data = np.zeros(layout.pages * layout.page_bytes, np.uint8)
        tokens = min(n, len(k) - start)
        for token in range(tokens):
            for value, source in enumerate((k, v)):
                data[slice(*layout.span(token, value=bool(value)))] = source[start + token].view(np.uint8)
        codewords = data.reshape(-1, CODEWORD_BYTES)
        yield _Page(PageKind.TOKEN, index, tokens, codewords, np.zeros((len(codewords), 4), np.uint8))


def _index_pages(k: F16, settings: HeadSettings) -> Iterator[_Page]:
    size = settings.block_tokens
    for block, start in enumerate(range(0, settings.count_scanned(len(k)), size)):
        layout = settings.index_layout
        rows, scales = _index_rows(k[start : start + size], layout)
        for page in range(layout.pages):
            page_rows = slice(page * layout.rows, (page + 1) * layout.rows)
            data = np.zeros((layout.page_bytes // CODEWORD_BYTES, CODEWORD_BYTES), np.uint8)
            data.reshape(-1)[: rows[page_rows].size] = rows[page_rows].reshape(-1)
            factors = np.zeros((len(data), 4), np.uint8)
            factors[: len(scales[page_rows]) * layout.row_codewords] = np.repeat(
                scales[page_rows], layout.row_codewords, axis=0
            )
            yield _Page(PageKind.INDEX, block * layout.pages + page, size, data, factors)


def _index_rows(k: F16, layout: IndexLayout) -> tuple[Bytes, Bytes]:
    """Rows (d, stride) of a block's k (T, d), and their scale and zero (d, 4)."""
    rows = np.zeros((layout.dim, layout.stride_bytes), np.uint8)
    scales = np.zeros((layout.dim, 2), np.float16)
    if layout.format is IndexFormat.FP16:
        values = np.ascontiguousarray(k.T).view(np.uint8)
    else:
        block = quantise(k, layout.format)
        values = block.rows()
        scales[:] = np.stack([block.scale, block.zero], axis=1)
    rows[:, : values.shape[1]] = values
    return rows, scales.view(np.uint8)
