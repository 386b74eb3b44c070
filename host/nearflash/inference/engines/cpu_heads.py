"""Some heads of one sequence in a call of CpuEngine: their scores, their choice, their attention, by compiled loops."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from nearflash.inference.engines import kernels, scoring
from nearflash.inference.engines.cpu_reads import Groups, SequenceReads
from nearflash.inference.engines.index_rows import IndexRows
from nearflash.inference.engines.page_cache import PageCache
from nearflash.inference.engines.softmax import AttentionForm
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.storage.io.reuse import reused_buffer
from nearflash.storage.kv import KvLayout

__all__ = ["Heads", "takes_all"]

F32 = NDArray[np.float32]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
_ALL = np.zeros((0, 0), bool)
_NO_SINKS = np.zeros(0, np.float32)
_thread = threading.local()
_CHUNK_BYTES = 8 << 20
"""Of KV page groups that are asked for at once."""


def takes_all(policy: AttentionPolicy, tokens: int, dim: int, layout: KvLayout) -> bool:
    """Whether the policy (without its overrides) takes all of so many tokens, whatever they are."""
    resolved = policy.resolve(tokens, dim, layout)
    if not resolved.score_dims or resolved.local_window >= tokens:
        return True
    return not resolved.top_p and resolved.top_k * policy.entry_tokens(layout) >= tokens


class Heads:
    """q (H, g, d) of heads that follow one policy: `ask`, then `choose`, then `attend`.

    Each asks for what it reads by `reader`, and waits for what was asked for before.
    """

    def __init__(self, row: int, reads: SequenceReads, q: F32, policy: AttentionPolicy, layout: KvLayout) -> None:
        self.row, self.reads, self.policy = row, reads, policy
        self._q, self._layout = q, layout
        self._takes_all = takes_all(policy, reads.tokens, q.shape[-1], layout)
        self._chosen: Bools | None = None
        """Tokens, (H, S); None: all, or all of a group."""
        self._tail: Bools | None = None
        """Of the tokens in memory, (H, u); None: all."""
        self._alpha = np.ones(q.shape[:2], np.float32)
        self._index: Future[tuple[IndexRows, NDArray[np.int64]]]
        self._suffix: Future[NDArray[np.float16]] | None = None
        """K of the unindexed suffix, where it is not all in memory."""
        self._groups: list[Future[Groups]] = []
        """In the order of their tokens, no more than _CHUNK_BYTES each: one comes while another is attended to."""

    def ask(self, ask: Callable[..., Future], index: object) -> None:
        """Ask for what the scores need; index: the engine's IndexCache."""
        if self._takes_all:
            return
        count = self.policy.resolve(self.reads.tokens, self._q.shape[-1], self._layout).score_dims
        self._dims = _top_dims(self._q, count)
        self._index = ask(self.reads.index, self._dims, index)
        self._suffix = None if self.reads.suffix_kept else ask(self.reads.suffix)

    def choose(self, ask: Callable[..., Future], groups: PageCache, form: AttentionForm[F32]) -> None:
        """Choose tokens, and ask for their groups; groups: the engine's PageCache."""
        stored, layout = self.reads.stored, self._layout
        full = stored.flash_tokens // layout.group_tokens
        if self._takes_all:
            wanted = np.ones((len(self._q), full), bool)
        else:
            wanted = self._choose(full, form)
        group_bytes = layout.group_pages * layout.page_bytes
        chunks = max(-(-int(wanted.sum()) * group_bytes // _CHUNK_BYTES), 1)
        for first, end in pairwise([full * chunk // chunks for chunk in range(chunks + 1)]):
            self._groups.append(self.reads.groups(ask, wanted[:, first:end], groups, first))

    def attend(self, form: AttentionForm[F32]) -> F32:
        """(H, g, d)."""
        stored, scaled = self.reads.stored, self._q * np.float32(form.scaling)
        largest, total = (np.empty(self._q.shape[:2], np.float32) for _ in range(2))
        out, softcap = np.empty(self._q.shape, np.float32), np.float32(form.softcap or 0.0)
        layout, dim = self._layout, self._q.shape[-1]
        elements = layout.group_pages * layout.page_bytes // 2
        stride, v_from = (2 * dim, dim) if layout.interleaved else (dim, layout.page_bytes // 2)
        for own in range(len(out)):
            kernels.start(largest[own], total[own], out[own])
        while self._groups:
            groups = self._groups.pop(0).result()
            kept, new = (data.reshape(-1).view(np.uint16) for data in (groups.kept, groups.new))
            kernels.attend_groups(
                scaled, kept, new, groups.places, groups.number, groups.ends, elements, v_from, stride,
                layout.group_tokens, _ALL if self._chosen is None else self._chosen, softcap, largest, total, out,
            )  # fmt: skip
        for own, head in enumerate(self.reads.heads):
            keys, values = (x[head].reshape(-1).view(np.uint16) for x in (stored.suffix_k, stored.suffix_v))
            tail = _ALL if self._tail is None else np.ascontiguousarray(self._tail[own])[None]
            sinks = _NO_SINKS if form.sinks is None else form.sinks[head]
            kernels.attend_suffix(scaled[own], keys, values, tail, softcap, sinks, self._alpha[own],
                                  stored.v_mean[head], largest[own], total[own], out[own])  # fmt: skip
        return out

    def _choose(self, full: int, form: AttentionForm[F32]) -> Bools:
        """The wanted groups, (H, full)."""
        layout, tokens, (heads, group, dim) = self._layout, self.reads.tokens, self._q.shape
        rows, places = self._index.result()
        suffix = self.reads.suffix() if self._suffix is None else self._suffix.result()
        near = np.take_along_axis(self._q, self._dims[:, None], axis=2)
        partly = np.zeros_like(self._q)
        np.put_along_axis(partly, np.broadcast_to(self._dims[:, None], near.shape), near, axis=2)
        resolved, each = self.policy.resolve(tokens, dim, layout), self.policy.entry_tokens(layout)
        covered = tokens // layout.block_tokens * layout.block_tokens
        scores = reused_buffer(4 * group * tokens).view(np.float32).reshape(group, tokens)
        entries = -(-tokens // each)
        taken, keys, shares = (np.empty((n, entries), kind) for n, kind in ((heads, bool), (1, "f4"), (group, "f4")))
        scoring.choose_heads(
            near, partly, rows.codes, rows.factors.view(np.uint16), np.ascontiguousarray(places),
            layout.index_format.bits, np.ascontiguousarray(suffix).view(np.uint16), covered,
            _logit_scales(self._q, near, form.scaling), np.float32(form.softcap or 0.0), each,
            self.policy.by_probability, resolved.local_window, resolved.top_k, resolved.top_p, scores, keys[0],
            shares, _counts(), taken, self._alpha,
        )  # fmt: skip
        flash = full * layout.group_tokens
        if each == layout.group_tokens:
            self._tail = np.repeat(taken[:, full:], each, axis=1)[:, : tokens - flash]
            return taken[:, :full]
        self._chosen, self._tail = taken, taken[:, flash:]
        wanted = np.logical_or.reduce(taken[:, :flash].reshape(heads, full, layout.group_tokens), axis=2)
        return np.asarray(wanted)


def _counts() -> NDArray[np.int32]:
    """What `choose` counts in, zeros before and after; each thread has its own."""
    if not hasattr(_thread, "counts"):
        _thread.counts = np.zeros(1 << 16, np.int32)
    counts: NDArray[np.int32] = _thread.counts
    return counts


def _top_dims(q: F32, count: int) -> NDArray[np.int64]:
    """The `count` dims of each head with the largest sum of |q| (H, g, d), rising, (H, count)."""
    sums = (np.abs(q).sum(axis=1, dtype=np.float64) / 8).astype(np.float16)
    order = np.argsort(-sums, axis=1, kind="stable")[:, :count]
    return np.sort(order, axis=1)


def _logit_scales(q: F32, near: F32, scale: float) -> F32:
    """Factors from approximate scores to logits, (H, g): `scale`, corrected for the share of |q| in the dims."""
    every, chosen = np.abs(q).sum(axis=2), np.abs(near).sum(axis=2)
    share = np.divide(every, chosen, out=np.ones_like(every), where=chosen > 0)
    scales: F32 = np.float32(scale) * np.sqrt(share)
    return scales
