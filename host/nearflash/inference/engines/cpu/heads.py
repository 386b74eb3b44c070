"""Some heads of one sequence in a call of CpuEngine: their scores, their choice, their attention, by native loops."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from nearflash.inference.engines.cpu.kernels import Choice, PageShape, RunningAttention
from nearflash.inference.engines.paged.index_rows import IndexCache, IndexRows
from nearflash.inference.engines.paged.page_cache import PageCache
from nearflash.inference.engines.paged.reads import Groups, SequenceReads
from nearflash.inference.engines.paged.softmax import AttentionForm
from nearflash.inference.policy.policy import AttentionPolicy, ResolvedPolicy
from nearflash.storage.kv import KvLayout

__all__ = ["Heads", "dims_by_size", "takes_all"]

F32 = NDArray[np.float32]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
_thread = threading.local()
_CHUNK_BYTES = 8 << 20
"""Of KV page groups that are asked for at once."""


def takes_all(policy: AttentionPolicy, tokens: int, dim: int, layout: KvLayout) -> bool:
    """Whether the policy (without its overrides) takes all of so many tokens, whatever they are."""
    return _takes_all(policy, policy.resolve(tokens, dim, layout), tokens, layout)


def _takes_all(policy: AttentionPolicy, resolved: ResolvedPolicy, tokens: int, layout: KvLayout) -> bool:
    if not resolved.score_dims or resolved.local_window >= tokens:
        return True
    return not resolved.top_p and resolved.top_k * policy.entry_tokens(layout) >= tokens


class _RunningInOrder:
    """A running attention over chunks of groups, in their order: each as soon as it and those before it have come.

    Threads may bring chunks at once: one of them attends to all that are there, so that sums are the same in any order
    of arrival.
    """

    def __init__(self, of: RunningAttention, shape: PageShape, chosen: Bools | None) -> None:
        self.of, self._shape, self._chosen = of, shape, chosen
        self._lock = threading.Lock()
        self._come: dict[int, Groups] = {}
        self._next = 0
        self._is_busy = False

    def attend(self, number: int, groups: Groups) -> None:
        """Take chunk `number`. When all have been taken and every call has returned, all are attended to."""
        with self._lock:
            self._come[number] = groups
            if self._is_busy:
                return
            self._is_busy = True
        while True:
            with self._lock:
                following = self._come.pop(self._next, None)
                if following is None:
                    self._is_busy = False
                    return
                self._next += 1
            self.of.attend_groups(following, self._shape, self._chosen)


class Heads:
    """q (H, g, d) of heads that follow one policy: `ask`, then `choose`, then `attend`.

    order (H, d): their dims, those first by which they are scored. Each asks for what it reads by `reader`, and waits
    for what was asked for before.
    """

    def __init__(
        self, row: int, reads: SequenceReads, q: F32, order: Ints, policy: AttentionPolicy, layout: KvLayout
    ) -> None:  # fmt: skip
        self.row, self.reads, self.policy = row, reads, policy
        self._q, self._layout = q, layout
        self._resolved = policy.resolve(reads.tokens, q.shape[-1], layout)
        self._takes_all = _takes_all(policy, self._resolved, reads.tokens, layout)
        self._dims = np.sort(order[:, : self._resolved.score_dims], axis=1)
        self._chosen: Bools | None = None
        """Tokens, (H, S); None: all, or all of a group."""
        self._tail: Bools | None = None
        """Of the tokens in memory, (H, u); None: all."""
        self._alpha = np.ones(q.shape[:2], np.float32)
        self._kept: IndexRows | None = None
        """Rows of all dims, where they are in memory; else:"""
        self._index: Future[tuple[IndexRows, Ints]]
        self._suffix: Future[NDArray[np.float16]] | None = None
        """K of the unindexed suffix, where it is not all in memory."""
        self._running: _RunningInOrder
        self._asked: list[Groups | Future[None]] = []
        """In the order of their tokens, no more than _CHUNK_BYTES each."""

    def ask(self, ask: Callable[..., Future], index: IndexCache) -> None:
        """Ask for what the scores need, and is not in memory; index: the engine's."""
        if self._takes_all:
            return
        self._kept = self.reads.find_index(index)
        if self._kept is None:
            self._index = ask(self.reads.index, self._dims, index)
        self._suffix = None if self.reads.suffix_kept else ask(self.reads.suffix)

    def choose(self, ask: Callable[..., Future], groups: PageCache, form: AttentionForm[F32]) -> Bools:
        """Choose tokens, and ask for their groups; groups: the engine's PageCache. The groups, (H, full).

        What is read is attended to by the thread that reads it, while others are read still.
        """
        stored, layout = self.reads.stored, self._layout
        full = stored.flash_tokens // layout.group_tokens
        if self._takes_all:
            wanted = np.ones((len(self._q), full), bool)
        else:
            wanted = self._choose(full, form)
        group_bytes = layout.group_pages * layout.page_bytes
        stride, v_from = layout.steps(self._q.shape[-1])
        shape = PageShape(group_bytes // 2, v_from, stride, layout.group_tokens)
        running = RunningAttention(self._q * np.float32(form.scaling), form.softcap)
        self._running = _RunningInOrder(running, shape, self._chosen)
        chunks = max(-(-int(wanted.sum()) * group_bytes // _CHUNK_BYTES), 1)
        for number, (first, end) in enumerate(pairwise([full * chunk // chunks for chunk in range(chunks + 1)])):
            use = partial(self._running.attend, number)
            self._asked.append(self.reads.use_groups(ask, wanted[:, first:end], groups, first, use))
        return wanted

    def predict_groups(self, index: IndexCache, form: AttentionForm[F32]) -> Bools:
        """The groups (H, full) that `choose` would ask for; none where it takes all, or would read to choose."""
        full = self.reads.stored.flash_tokens // self._layout.group_tokens
        self._kept = None if self._takes_all or not self.reads.suffix_kept else self.reads.find_index(index)
        return np.zeros((len(self._q), full), bool) if self._kept is None else self._choose(full, form)

    def attend(self, form: AttentionForm[F32]) -> F32:
        """(H, g, d)."""
        for number, asked in enumerate(self._asked):
            if isinstance(asked, Groups):
                self._running.attend(number, asked)
        for asked in self._asked:
            if isinstance(asked, Future):
                asked.result()
        tail = None if self._tail is None else np.ascontiguousarray(self._tail)
        return self._running.of.finish(self.reads.stored, np.array(self.reads.heads), tail, self._alpha, form.sinks)

    def _choose(self, full: int, form: AttentionForm[F32]) -> Bools:
        """The wanted groups, (H, full)."""
        layout, tokens, (heads, group, _) = self._layout, self.reads.tokens, self._q.shape
        rows, places = self._index.result() if self._kept is None else (self._kept, self._dims)
        suffix = self.reads.suffix() if self._suffix is None else self._suffix.result()
        resolved, each = self._resolved, self.policy.entry_tokens(layout)
        choice = Choice(each, self.policy.by_probability, resolved.local_window, resolved.top_k, resolved.top_p)
        taken, self._alpha = choice.choose(
            self._q, self._dims, rows, np.ascontiguousarray(places), layout.index_format.bits,
            suffix, form, _room(group * tokens),
        )  # fmt: skip
        flash = full * layout.group_tokens
        if each == layout.group_tokens:
            self._tail = np.repeat(taken[:, full:], each, axis=1)[:, : tokens - flash]
            return taken[:, :full]
        self._chosen, self._tail = taken, taken[:, flash:]
        wanted = np.logical_or.reduce(taken[:, :flash].reshape(heads, full, layout.group_tokens), axis=2)
        return np.asarray(wanted)


def _room(scores: int) -> tuple[F32, NDArray[np.int32]]:
    """Room for scores, and what `choose` counts in, zeros before and after; each thread has its own."""
    if not hasattr(_thread, "counts"):
        _thread.counts, _thread.scores = np.zeros(1 << 16, np.int32), np.empty(0, np.float32)
    if len(_thread.scores) < scores:
        _thread.scores = np.empty(scores * 5 // 4, np.float32)
    return _thread.scores[:scores], _thread.counts


def dims_by_size(q: NDArray[np.float16]) -> Ints:
    """The dims of each head, (…, d), those first whose sum of |q| (…, g, d) is the largest, the lower among equals."""
    sums = (np.abs(q).sum(axis=-2, dtype=np.float64) / 8).astype(np.float16)
    return np.argsort(-sums, axis=-1, kind="stable")
