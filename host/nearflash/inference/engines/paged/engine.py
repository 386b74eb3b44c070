"""The base of engines whose KV page groups are read by threads of the host, and kept in its memory or in a GPU's."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearflash.abi.errors import ShapeError
from nearflash.inference.engines.paged.ahead import AheadGroups, LastChoices, read_chosen, read_known
from nearflash.inference.engines.paged.page_cache import PageCache
from nearflash.inference.engines.paged.reads import Groups, SequenceReads
from nearflash.inference.engines.paged.softmax import AttentionForm, OnlineSoftmax
from nearflash.inference.engines.store import StoreEngine
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.storage.kv import KvStore, StoredHead

__all__ = ["PagedEngine"]

Ints = NDArray[np.int64]
_P = ParamSpec("_P")
_R = TypeVar("_R")
_READERS = 4
"""Threads that wait for KV page groups, each for those of a part."""
_AHEAD_READERS = 2
"""And for those that are read ahead: the first sequences' come first."""
_AHEAD_BYTES = 16 << 20
"""Most that is read ahead of a call; more would not be read into memory that is used again (storage.io.reuse)."""


class PagedEngine(StoreEngine):
    """`pages` keeps KV page groups that were read."""

    logits_at_once = 1 << 24
    """Where several tokens attend: what bounds the memory of a call."""

    def __init__(self, store: KvStore, policy: AttentionPolicy, first_head: int, name: str, pages: PageCache) -> None:
        super().__init__(store, policy, first_head, name)
        self._pages = pages
        self._readers = ThreadPoolExecutor(_READERS, "kv-pages")
        self._ahead_readers = ThreadPoolExecutor(_AHEAD_READERS, "kv-ahead")
        self._asked: list[Future[object]] = []
        self._choices = LastChoices(store.shape.kv_heads)
        self._ahead: dict[tuple[int, int], AheadGroups] = {}
        """What is read for a coming call, by layer and sequence."""

    def close(self) -> None:
        """See Engine.close."""
        self._ahead_readers.shutdown()
        self._readers.shutdown()
        super().close()

    @property
    def takes_masks(self) -> bool:
        """See Engine.takes_masks."""
        return True

    def attend_masked(
        self, layer: int, sequence: int, q: NDArray[np.float16], visible: NDArray[np.bool_],
        scaling: float | None = None, *, softcap: float | None = None, sinks: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:  # fmt: skip
        """See Engine.attend_masked."""
        on = self.torch_device or torch.device("cpu")
        states, seen = (torch.from_numpy(np.ascontiguousarray(array)).to(on) for array in (q, visible))
        kept = None if sinks is None else torch.from_numpy(sinks).to(on)
        form = AttentionForm(q.shape[-1] ** -0.5 if scaling is None else scaling, softcap, kept)
        with self._call(layer, [sequence]):
            return np.asarray(self._several(layer, sequence, states.float(), form, seen).cpu().numpy())

    @abstractmethod
    def _gather(self, groups: Groups) -> Tensor:
        """Groups in the order of their tokens, (n, elements)."""

    @abstractmethod
    def _suffix(self, stored: StoredHead) -> Tensor:
        """K and V (2, H, u, d) of a layer's tokens in memory."""

    def _truncate(self, sequence: int, length: int) -> None:
        self._drop_ahead(sequence)
        self._pages.truncate(sequence, length // self.store.layout.group_tokens)

    def _forget(self, sequence: int) -> None:
        self._drop_ahead(sequence)
        self._pages.drop(sequence)

    def _settle(self) -> None:
        wait([ahead.data for ahead in self._ahead.values()])

    def _drop_ahead(self, sequence: int) -> None:
        self._choices.drop(sequence)
        for key in [key for key in self._ahead if key[1] == sequence]:
            del self._ahead[key]

    def _read_next(self, layer: int, sequences: Sequence[int], *, first_only: bool = False) -> None:
        """Begin to read what the call that came after this one the last time will want, if it chooses as it did then.

        Up to _AHEAD_BYTES; what is left from calls that did not come is dropped. first_only: only of the first layer.
        """
        after = self._choices.call_after(layer, sequences)
        if after is None or (first_only and after[0]):
            return
        self._settle()
        self._ahead.clear()
        layout, (layer, sequences) = self.store.layout, after
        most = _AHEAD_BYTES // (len(sequences) * layout.group_pages * layout.page_bytes)
        parts, reads = [], list[tuple[SequenceReads, Ints, Ints]]()
        for sequence in sequences:
            chosen = self._choices.predict(layer, sequence)
            if chosen is None:
                continue
            heads, groups = np.nonzero(chosen[:, : int(np.searchsorted(chosen.sum(axis=0).cumsum(), most, "right"))])
            lacking = self._pages.lacks(sequence, layer, heads, groups)
            if lacking.any():
                own = self._reads_of_all(self.store.layer(sequence, layer)), heads[lacking], groups[lacking]
                reads.append(own)
                parts.append((own[0].tokens + 1, chosen, *own[1:]))
        if reads:
            begun = read_known(self._ahead_readers, parts, partial(SequenceReads.read_together, reads))
            self._ahead |= {(layer, own.stored.sequence): ahead for (own, *_), ahead in zip(reads, begun, strict=True)}

    def _take_ahead(self, layer: int, sequence: int) -> AheadGroups | None:
        """Hand over the reads ahead for this call of a sequence; the call does not end before they do."""
        ahead = self._ahead.pop((layer, sequence), None)
        if ahead is not None:
            self._asked.append(ahead.data)  # type: ignore[arg-type]
        return ahead

    def _begin_ahead(
        self, layer: int, stored: StoredHead, tokens: int, choose: Callable[[], NDArray[np.bool_]]
    ) -> None:
        """Begin to read what `choose` gives, (heads, groups), for a call of a sequence when it has `tokens`."""
        lacks = partial(self._pages.lacks, stored.sequence, layer)
        read = self._reads_of_all(stored).read_groups
        self._ahead[layer, stored.sequence] = read_chosen(tokens, self._ahead_readers, choose, lacks, read)

    def _reads_of_all(self, stored: StoredHead, ahead: AheadGroups | None = None) -> SequenceReads:
        return SequenceReads(self.store, stored, list(range(self.kv_heads)), self._read, ahead)

    @contextmanager
    def _call(self, layer: int, sequences: Sequence[int]) -> Iterator[None]:
        """A call of `attend`: nothing that it asked for is under way afterwards."""
        with self._lock, self._counters.time_phase("attend"):
            self._pages.begin(layer, sequences)
            try:
                yield
            finally:
                if self._asked:
                    wait(self._asked)  # after a failure too: the store is not read while it is written to
                    self._asked.clear()
                self._counters.heads += len(sequences) * self.kv_heads

    def _several(
        self, layer: int, sequence: int, q: Tensor, form: AttentionForm[Any], visible: Tensor | None = None
    ) -> Tensor:
        """(H, t, g, d) of q, alike, of the sequence's last t tokens: dense, or over the `visible` ones alone."""
        stored, layout = self.store.layer(sequence, layer), self.store.layout
        heads, new, group, _ = q.shape
        if visible is not None and visible.shape != (new, stored.tokens):
            raise ShapeError(f"visible must be of {new} queries, {stored.tokens} tokens, not {tuple(visible.shape)}")
        if visible is None and new > stored.tokens:
            raise ShapeError(f"q must be of at most the {stored.tokens} tokens that sequence {sequence} has, not {new}")
        reads = SequenceReads(self.store, stored, list(range(heads)), self._read)
        full = stored.flash_tokens // layout.group_tokens
        most = max(self.logits_at_once // (heads * new * group * layout.group_tokens), 1)
        parts = [range(first, min(first + most, full)) for first in range(0, full, most)]
        sinks = None if form.sinks is None else torch.as_tensor(form.sinks)
        softmax = OnlineSoftmax(q * form.scaling, stored.tokens, form.softcap, sinks, visible)

        def ask(groups: range) -> Future[Groups]:
            return reads.groups(self._ask_groups, np.ones((heads, len(groups)), bool), self._pages, groups.start)

        asked = [ask(groups) for groups in parts[:1]]
        for number, groups in enumerate(parts):
            if number + 1 < len(parts):
                asked.append(ask(parts[number + 1]))  # the next part is read while this one is computed
            pages = self._gather(asked.pop(0).result()).float().unflatten(0, (heads, len(groups)))
            softmax.add(*self._values(pages), groups.start * layout.group_tokens)
        k, v = self._suffix(stored).float()
        softmax.add(k, v, stored.flash_tokens)
        return softmax.result()

    def _values(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """K and V (H, tokens, d) in the elements (H, groups, …) of pages; views where the pages are full."""
        n, dim = self.store.layout.group_tokens, self.store.shape.dim
        if self.store.layout.interleaved:
            k, v = pages[..., : 2 * n * dim].unflatten(2, (n, 2, dim)).unbind(3)
        else:
            k, v = pages.unflatten(2, (2, -1))[..., : n * dim].unflatten(3, (n, dim)).unbind(2)
        return k.flatten(1, 2), v.flatten(1, 2)

    def _ask_groups(self, call: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> Future[_R]:
        """Have a reader of KV page groups do it."""
        return self._submit(self._readers, call, *args, **kwargs)

    def _submit(
        self, readers: ThreadPoolExecutor, call: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs
    ) -> Future[_R]:
        """Have one of these threads do it; the call of `attend` ends when it is done."""
        asked = readers.submit(call, *args, **kwargs)
        self._asked.append(asked)  # type: ignore[arg-type]
        return asked
