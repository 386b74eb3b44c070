"""The base of engines over a KvStore: sequences, appended tokens, one call at a time."""

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.codeword import PageKind
from nearflash.inference.engines.base import Engine, EngineCounters
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.storage.flash.geometry import PageNumbers
from nearflash.storage.flash.page import PageData, PageKeys
from nearflash.storage.kv import KvStore

__all__ = ["StoreEngine"]


class StoreEngine(Engine):
    """An engine whose K and V are in a store, which is its own from now on.

    `first_head` is the number, in the model, of the store's first KV head: overrides of the policy go by that.
    """

    def __init__(self, store: KvStore, policy: AttentionPolicy, first_head: int, name: str) -> None:
        self.store, self.policy, self.first_head, self.name = store, policy, first_head, name
        self.kv_heads = store.shape.kv_heads
        self._counters = EngineCounters()
        self._lock = threading.Lock()

    def add(self) -> int:
        """See Engine.add."""
        with self._lock:
            return self.store.add()

    def free(self, sequence: int) -> None:
        """See Engine.free."""
        with self._lock:
            self._settle()
            self._forget(sequence)
            self.store.free(sequence)

    def fork(self, sequence: int) -> int:
        """See Engine.fork."""
        with self._lock:
            self._settle()
            other = self.store.fork(sequence)
            self._share(sequence, other)
            return other

    def crop(self, sequence: int, length: int) -> None:
        """See Engine.crop."""
        with self._lock:
            self._settle()
            self.store.crop(sequence, length)
            self._truncate(sequence, length)

    def append(self, sequence: int, layer: int, k: NDArray[np.float16], v: NDArray[np.float16]) -> None:
        """See Engine.append."""
        with self._lock, self._counters.time_phase("append"):
            if k.ndim != 3 or self.store.fills_group(sequence, layer, k.shape[1]):
                self._settle()
            self.store.append(sequence, layer, k, v)

    @property
    def lengths(self) -> Mapping[int, int]:
        """See Engine.lengths."""
        return self.store.lengths

    @property
    def is_kept(self) -> bool:
        """See Engine.is_kept."""
        return self.store.is_kept

    @property
    def notes(self) -> Mapping[int, Mapping[str, Any]]:
        """See Engine.notes."""
        return self.store.notes

    def note(self, sequence: int, info: Mapping[str, Any]) -> None:
        """See Engine.note."""
        with self._lock:
            if self.store.is_kept:
                self.store.note(sequence, info)

    def flush(self) -> None:
        """See Engine.flush."""
        with self._lock:
            if self.store.is_kept:
                self._settle()
                self.store.flush()

    @property
    def counters(self) -> EngineCounters:
        """See Engine.counters."""
        return self._counters

    def close(self) -> None:
        """See Engine.close."""
        self.store.close()

    def _settle(self) -> None:
        """End reads that were begun ahead: page numbers hold only until the store's pages change."""

    def _forget(self, sequence: int) -> None:
        """Drop what is kept of a sequence beside the store."""

    def _share(self, sequence: int, other: int) -> None:
        """`other` is a fork of a sequence: what is kept beside the store may serve both."""

    def _truncate(self, sequence: int, length: int) -> None:
        """Drop what is kept beside the store of tokens from `length` on."""

    def _read(self, kind: PageKind, pages: PageNumbers, keys: PageKeys) -> PageData:
        """Pages of the store, counted; threads may read at once."""
        with self._counters.time_phase("read"):
            read = self.store.read(pages, keys)
        self._counters.count(kind.name.lower(), len(pages) * self.store.layout.page_bytes)
        return read

    def _policy_at(self, layer: int, head: int) -> AttentionPolicy:
        """The policy of the store's KV head `head`."""
        return self.policy.at(layer, self.first_head + head)
