"""Heads of several sequences as the rows of padded arrays, and their K and V out of pages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attend.codeword import CODEWORD_BYTES, PageKind
from nearflash.storage.flash.page import PageData, PageKeys, page_keys
from nearflash.storage.kv import KvStore

__all__ = ["Groups", "StoredRows"]

F16 = NDArray[np.float16]
Ints = NDArray[np.int64]
_S = TypeVar("_S", bound=np.generic)
Read = Callable[[PageKind, Ints, PageKeys], PageData]


@dataclass(frozen=True)
class Groups:
    """Token groups of N rows, W slots each; a row's slots behind its last group are zero."""

    number: Ints
    """(N, W): which group; -1 for none."""
    k: F16
    """(N, W, n, d)."""
    v: F16
    """Alike; empty where only K was wanted."""


@dataclass(frozen=True)
class StoredRows:
    """Where K and V of N heads of a layer are, as KvStore.layer gives them. Page numbers are -1 where there is none."""

    layer: int
    sequences: Ints
    """(N,)."""
    heads: Ints
    """(N,)."""
    tokens: Ints
    """(N,): S of each."""
    token_pages: Ints
    """(N, groups)."""
    index_pages: Ints
    """(N, pages)."""
    tail_k: F16
    """(N, n, d): of the group that is not full, zeros behind."""
    tail_v: F16
    v_mean: NDArray[np.float32]
    """(N, d)."""

    @classmethod
    def of(cls, store: KvStore, sequences: Sequence[int], layer: int, heads: Sequence[int]) -> Self:
        """Row s·len(heads) + h is sequence s, head h."""
        stored = [store.layer(sequence, layer) for sequence in sequences]
        own, count = list(heads), len(heads)
        return cls(
            layer,
            np.repeat(np.array(sequences, np.int64), count),
            np.tile(np.array(own, np.int64), len(stored)),
            np.repeat(np.array([one.tokens for one in stored], np.int64), count),
            _padded([one.token_pages[own] for one in stored], -1),
            _padded([one.index_pages[own] for one in stored], -1),
            _padded([one.tail_k[own] for one in stored], 0, store.layout.group_tokens),
            _padded([one.tail_v[own] for one in stored], 0, store.layout.group_tokens),
            np.concatenate([one.v_mean[own] for one in stored]),
        )

    def groups(self, store: KvStore, wanted: NDArray[np.bool_], read: Read, *, values: bool) -> Groups:
        """The wanted token groups (N, groups), their V too where `values`; those not full come from memory."""
        slots = int(wanted.sum(axis=1).max(initial=0))
        number = np.argsort(~wanted, axis=1, kind="stable")[:, :slots]
        number = np.where(np.take_along_axis(wanted, number, axis=1), number, -1)
        full = (self.tokens // store.layout.group_tokens)[:, None]
        k = np.zeros((*number.shape, *self.tail_k.shape[1:]), np.float16)
        v = np.zeros_like(k if values else k[:, :0])
        rows, places = np.nonzero((number >= 0) & (number < full))
        if rows.size:
            groups = number[rows, places]
            pages, keys = self._group_pages(store, rows, groups, both=values)
            data = read(PageKind.TOKEN, pages, keys).data
            if values:
                k[rows, places], v[rows, places] = store.pages.token_values(data)
            else:
                k[rows, places] = store.pages.k_values(data)
        rows, places = np.nonzero(number == full)
        k[rows, places] = self.tail_k[rows]
        if values:
            v[rows, places] = self.tail_v[rows]
        return Groups(number, k, v)

    def index(self, store: KvStore, wanted: NDArray[np.bool_], read: Read) -> tuple[Ints, PageData]:
        """The wanted embedding pages (N, pages), and where each is in what was read (N, pages), -1 for none."""
        rows, places = np.nonzero(wanted)
        slots = np.full(wanted.shape, -1)
        slots[rows, places] = np.arange(len(rows))
        keys = page_keys(self.sequences[rows], self.layer, self.heads[rows], places, PageKind.INDEX)
        return slots, read(PageKind.INDEX, self.index_pages[rows, places], keys)

    def _group_pages(self, store: KvStore, rows: Ints, groups: Ints, *, both: bool) -> tuple[Ints, PageKeys]:
        """Pages and keys of groups, (groups · pages of each); of separate ones K's alone unless `both`."""
        pages = np.arange(store.layout.group_pages if both else 1)
        first = pages * (store.layout.page_bytes // CODEWORD_BYTES)
        keys = page_keys(
            self.sequences[rows][:, None], self.layer, self.heads[rows][:, None], groups[:, None], PageKind.TOKEN, first
        )
        return (self.token_pages[rows, groups][:, None] + pages).reshape(-1), keys.reshape(-1)


def _padded(arrays: Sequence[NDArray[_S]], fill: int, least: int = 0) -> NDArray[_S]:
    """Arrays (heads, length, …) one behind the other, each padded to the longest, or to `least`."""
    longest = max(least, *(array.shape[1] for array in arrays))
    padded: NDArray[_S] = np.full((sum(map(len, arrays)), longest, *arrays[0].shape[2:]), fill, arrays[0].dtype)
    start = 0
    for array in arrays:
        padded[start : start + len(array), : array.shape[1]] = array
        start += len(array)
    return padded
