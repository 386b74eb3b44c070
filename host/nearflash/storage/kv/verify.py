"""The content of a file, page by page, as whatever ended its user left it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nearflash.abi.attention.codeword import PageKind
from nearflash.storage.flash.file import KEPT, FileFlash
from nearflash.storage.flash.geometry import PageNumbers
from nearflash.storage.flash.page import PageKeys
from nearflash.storage.kv.kept import read_kept_sequences
from nearflash.storage.kv.layout import KvLayout, KvShape, read_label

__all__ = ["Coverage", "Verification", "verify"]

_BATCH_BYTES = 32 << 20


@dataclass(frozen=True)
class Coverage:
    """Valid pages of one head; pages that were moved or freed count until their block is erased."""

    groups: frozenset[int]
    """KV page groups, of separate ones those with K and V."""
    index: frozenset[int]
    """Page indices of index pages."""

    def tokens(self, layout: KvLayout) -> int:
        """Tokens from the first on that are valid."""
        return _leading(self.groups) * layout.group_tokens

    def count_indexed(self, layout: KvLayout, dim: int) -> int:
        """Tokens from the first on whose index pages are valid."""
        return _leading(self.index) // layout.index_layout(dim).pages * layout.block_tokens


@dataclass
class Verification:
    """Counts of pages, the torn ones in words, and what is valid by (sequence, layer, head)."""

    shape: KvShape
    layout: KvLayout
    valid: int = 0
    erased: int = 0
    torn: list[str] = field(default_factory=list)
    heads: dict[tuple[int, int, int], Coverage] = field(default_factory=dict)
    """By the number that pages go by: of a kept sequence there may be several."""
    kept: dict[int, int] | None = None
    """Tokens of each sequence of a kept store, as it would have them again."""

    def sequences(self) -> Iterator[tuple[int, int, int]]:
        """Each sequence, the tokens that are valid in all of its heads, and the most that one has."""
        for sequence in sorted({sequence for sequence, _, _ in self.heads}):
            tokens = [head.tokens(self.layout) for (number, _, _), head in self.heads.items() if number == sequence]
            missing = len(tokens) < self.shape.layers * self.shape.kv_heads
            yield sequence, 0 if missing else min(tokens), max(tokens)

    def tokens(self) -> dict[int, int]:
        """Tokens of each sequence that are valid in all of its heads."""
        return {number: least for number, least, _ in self.sequences()} if self.kept is None else self.kept


def verify(path: Path, **options: Any) -> Verification:
    """Read every page of a KV store's file; `options` are FileFlash.open's. Raises StateError, also while in use."""
    with FileFlash.open(path, writable=False, **options) as flash:
        shape, layout = read_label(flash.about)
        verification, valid = Verification(shape, layout), []
        step = max(_BATCH_BYTES // flash.geometry.page_bytes // 2 * 2, 2)
        for start in range(0, flash.geometry.pages, step):
            pages = np.arange(start, min(start + step, flash.geometry.pages))
            keys, known, erased = flash.headers(pages)
            verification.erased += int(erased.sum())
            pages, keys, known = pages[~erased], keys[~erased], known[~erased] & (keys["kind"][~erased] < len(PageKind))
            _set_first(keys, pages, layout)
            good = known & flash.valid(pages, keys)
            valid.append(keys[good])
            verification.torn += [_torn(flash, verification, int(page), key if has else None)
                           for page, key, has in zip(pages[~good], keys[~good], known[~good], strict=True)]  # fmt: skip
        keys = np.concatenate(valid)
        verification.valid, verification.heads = len(keys), _coverage(keys, layout)
        if KEPT in flash.about:
            verification.kept = read_kept_sequences(flash, verify=bool(verification.torn))
        return verification


def _set_first(keys: PageKeys, pages: PageNumbers, layout: KvLayout) -> None:
    """Headers do not distinguish V's pages from K's; their places do: V's are the odd ones."""
    second = (keys["kind"] == PageKind.TOKEN) & (pages % layout.group_pages == 1)
    keys["first"][second] = layout.page_codewords


def _torn(flash: FileFlash, found: Verification, page: int, key: np.void | None) -> str:
    """A torn page in words."""
    whose = "a page without header" if key is None else found.layout.describe(key, found.shape.dim)
    return f"{whose}: page {page}, file offset {flash.offset(page)}"


def _coverage(keys: PageKeys, layout: KvLayout) -> dict[tuple[int, int, int], Coverage]:
    names = ("sequence", "layer", "head")
    keys = keys[np.lexsort([keys[name] for name in reversed(names)])]
    changes = np.zeros(max(len(keys) - 1, 0), bool)
    for name in names:
        changes |= keys[name][1:] != keys[name][:-1]
    heads = {}
    for head_keys in np.split(keys, np.flatnonzero(changes) + 1):
        if len(head_keys):
            sequence, layer, head = (int(head_keys[name][0]) for name in names)
            index = head_keys["index"][head_keys["kind"] == PageKind.INDEX]
            heads[sequence, layer, head] = Coverage(_groups(head_keys, layout), frozenset(index.tolist()))
    return heads


def _groups(keys: PageKeys, layout: KvLayout) -> frozenset[int]:
    """KV page groups of which all pages are there."""
    tokens = np.unique(keys[keys["kind"] == PageKind.TOKEN])
    groups, counts = np.unique(tokens["index"], return_counts=True)
    return frozenset(groups[counts == layout.group_pages].tolist())


def _leading(numbers: frozenset[int]) -> int:
    """How many of 0, 1, 2, … there are before the first that is missing."""
    count = 0
    while count in numbers:
        count += 1
    return count
