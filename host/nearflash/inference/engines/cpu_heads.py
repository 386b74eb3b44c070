"""Some heads of one sequence in a call of CpuEngine: their scores, their choice, their attention, by compiled loops."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nearflash.inference.engines import kernels
from nearflash.inference.engines.cpu_reads import Groups, SequenceReads
from nearflash.inference.engines.index_rows import IndexRows
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.storage.kv import KvLayout

__all__ = ["AttentionForm", "Heads", "takes_all"]

F32 = NDArray[np.float32]
Bools = NDArray[np.bool_]
_ALL = np.zeros((0, 0), bool)
_START = np.zeros(1, np.int64)
_NO_SINKS = np.zeros(0, np.float32)
_BINS = 1 << 16


@dataclass(frozen=True)
class AttentionForm:
    """Of the softmax."""

    scaling: float
    softcap: float | None
    sinks: F32 | None
    """(kv_heads, g)."""


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
        self._suffix: Future[NDArray[np.float16]]
        self._groups: Future[Groups]

    def ask(self, ask: Callable[..., Future], index: object) -> None:
        """Ask for what the scores need; index: the engine's IndexCache."""
        if self._takes_all:
            return
        count = self.policy.resolve(self.reads.tokens, self._q.shape[-1], self._layout).score_dims
        self._dims = _top_dims(self._q, count)
        self._index, self._suffix = ask(self.reads.index, self._dims, index), ask(self.reads.suffix)

    def choose(self, ask: Callable[..., Future], groups: object, form: AttentionForm) -> None:
        """Choose tokens, and ask for their groups; groups: the engine's PageCache."""
        stored, layout = self.reads.stored, self._layout
        full = stored.flash_tokens // layout.group_tokens
        if self._takes_all:
            wanted = np.ones((len(self._q), full), bool)
        else:
            wanted = self._choose(full, form)
        self._groups = ask(self.reads.groups, wanted, groups)

    def attend(self, form: AttentionForm) -> F32:
        """(H, g, d)."""
        stored, groups, layout = self.reads.stored, self._groups.result(), self._layout
        out, softcap = np.empty(self._q.shape, np.float32), np.float32(form.softcap or 0.0)
        q, each, dim = self._q * np.float32(form.scaling), layout.group_tokens, self._q.shape[-1]
        elements = layout.group_pages * layout.page_bytes // 2
        stride, v_from = (2 * dim, dim) if layout.interleaved else (dim, layout.page_bytes // 2)
        kept, new = (data.reshape(-1).view(np.uint16) for data in (groups.kept, groups.new))
        starts = np.cumsum([0, *map(len, groups.number)])
        group = q.shape[1]
        for own, head in enumerate(self.reads.heads):
            largest, total = np.empty(group, np.float32), np.empty(group, np.float32)
            kernels.start(largest, total, out[own])
            places = groups.places[starts[own] : starts[own + 1]]
            for data, here, rows in ((kept, places >= 0, places), (new, places < 0, -1 - places)):
                if here.any():
                    k_at = rows[here] * elements
                    chosen = _ALL
                    if self._chosen is not None:
                        each_token = self._chosen[own, : stored.flash_tokens].reshape(-1, each)
                        chosen = np.ascontiguousarray(each_token[groups.number[own][here]])
                    kernels.attend(q[own], data, data, k_at, k_at + v_from, stride, each, chosen, softcap,
                                   largest, total, out[own])  # fmt: skip
            tail = None if self._tail is None else self._tail[own]
            suffix = stored.suffix_k[head], stored.suffix_v[head]
            _attend_suffix(q[own], *suffix, tail, softcap, largest, total, out[own])
            sinks = _NO_SINKS if form.sinks is None else form.sinks[head]
            kernels.finish(sinks, self._alpha[own], stored.v_mean[head], largest, total, out[own])
        return out

    def _choose(self, full: int, form: AttentionForm) -> Bools:
        """The wanted groups, (H, full)."""
        layout, tokens, (heads, group, dim) = self._layout, self.reads.tokens, self._q.shape
        rows, places = self._index.result()
        suffix = np.ascontiguousarray(self._suffix.result()).view(np.uint16)
        factors = rows.factors.view(np.uint16)
        near = np.take_along_axis(self._q, self._dims[:, None], axis=2)
        partly = np.zeros_like(self._q)
        np.put_along_axis(partly, np.broadcast_to(self._dims[:, None], near.shape), near, axis=2)
        resolved, each = self.policy.resolve(tokens, dim, layout), self.policy.entry_tokens(layout)
        scales = _logit_scales(self._q, near, form.scaling)
        covered = tokens // layout.block_tokens * layout.block_tokens
        softcap, bits = np.float32(form.softcap or 0.0), layout.index_format.bits
        scores, keys = np.empty((group, tokens), np.float32), np.empty(-(-tokens // each), np.float32)
        taken, counts = np.empty((heads, len(keys)), bool), np.zeros(_BINS, np.int32)
        for own in range(heads):
            if covered:
                kernels.score_index(near[own], rows.codes[own], factors[own], places[own], bits, scores)
            kernels.score_keys(partly[own], suffix[own], covered, scores)
            kernels.weigh(scores, scales[own], softcap, each, self.policy.by_probability, keys)
            kernels.choose(keys, scores, each, resolved.local_window, resolved.top_k, resolved.top_p, counts,
                           taken[own], self._alpha[own])  # fmt: skip
        flash = full * layout.group_tokens
        if each == layout.group_tokens:
            self._tail = np.repeat(taken[:, full:], each, axis=1)[:, : tokens - flash]
            return taken[:, :full]
        self._chosen, self._tail = taken, taken[:, flash:]
        wanted = np.logical_or.reduce(taken[:, :flash].reshape(heads, full, layout.group_tokens), axis=2)
        return np.asarray(wanted)


def _attend_suffix(
    q: F32, k: NDArray[np.float16], v: NDArray[np.float16], chosen: Bools | None, softcap: np.float32,
    largest: F32, total: F32, out: F32,
) -> None:  # fmt: skip
    """Go on with the tokens in memory, k and v (u, d)."""
    if len(k):
        keys, values = (x.reshape(-1).view(np.uint16) for x in (k, v))
        mask = _ALL if chosen is None or chosen.all() else np.ascontiguousarray(chosen)[None]
        kernels.attend(q, keys, values, _START, _START, k.shape[1], len(k), mask, softcap, largest, total, out)


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
