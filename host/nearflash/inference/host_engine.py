"""Attention by the host: it reads the pages that a policy asks for, and computes in float32.

    index rows of the chosen channels ─► approximate logits ─► chosen tokens ─► their groups ─► attention

A thread reads ahead: groups of one sequence come while another's index is scored, or its groups are attended to. The
numbers are those of docs/attention.md, 1, without its rounding to fixed point; pages are read whole, and checked.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearflash.abi.attend.codeword import PageKind
from nearflash.inference.engine import Engine, EngineCounters
from nearflash.inference.host_reads import Groups, SequenceReads
from nearflash.inference.index_rows import IndexMemory, score_rows
from nearflash.inference.policy import AttentionPolicy
from nearflash.inference.sparse.attention import Scan, choose_tokens, scan_of
from nearflash.inference.sparse.selection import logit_scales, top_channels
from nearflash.storage.flash.page import PageData, PageKeys
from nearflash.storage.kv import KvStore

__all__ = ["HostEngine"]

Ints = NDArray[np.int64]
_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass
class _Part:
    """Some heads of one sequence."""

    reads: SequenceReads
    q: Tensor
    """(H, g, d)."""
    chosen: Tensor
    """(H, S) bool."""
    alpha: Tensor
    """(H, g, 1)."""
    groups: Future[Groups] | None = None
    """Of the chosen tokens, on their way."""


class HostEngine(Engine):
    """Attends by the policy to what the store holds.

    `first_head` is the number, in the model, of the store's first KV head: overrides of the policy go by that. Of the
    index up to `index_bytes` stay in memory once they were read. The store is the engine's own from now on.
    """

    def __init__(
        self, store: KvStore, policy: AttentionPolicy, *, first_head: int = 0, index_bytes: int = 0, name: str = "host"
    ) -> None:
        self.store, self.policy, self.first_head, self.name = store, policy, first_head, name
        self.kv_heads = store.shape.kv_heads
        self._index = IndexMemory(index_bytes)
        self._counters = EngineCounters()
        self._lock = threading.Lock()
        self._reader = ThreadPoolExecutor(1, "kv-reader")
        self._asked: list[Future[object]] = []

    def add(self) -> int:
        """See Engine.add."""
        with self._lock:
            return self.store.add()

    def free(self, sequence: int) -> None:
        """See Engine.free."""
        with self._lock:
            self._index.drop(sequence)
            self.store.free(sequence)

    def append(self, sequence: int, layer: int, k: NDArray[np.float16], v: NDArray[np.float16]) -> None:
        """See Engine.append."""
        with self._lock, self._counters.timed("append"):
            self.store.append(sequence, layer, k, v)

    def attend(
        self, layer: int, sequences: Sequence[int], q: NDArray[np.float16], scaling: float | None = None
    ) -> NDArray[np.float32]:
        """See Engine.attend."""
        out = np.empty(q.shape, np.float32)
        scaling = q.shape[-1] ** -0.5 if scaling is None else scaling
        with self._lock, torch.no_grad():
            stored = [self.store.layer(sequence, layer) for sequence in sequences]
            for policy, heads in self._policies(layer).items():
                parts = [
                    _part(SequenceReads(self.store, one, heads, self._read), torch.from_numpy(own[heads]).float())
                    for one, own in zip(stored, q, strict=True)
                ]
                out[:, heads] = self._attend(parts, policy, scaling)
            self._counters.heads += len(sequences) * self.kv_heads
        return out

    @property
    def memory_bytes(self) -> int:
        """Memory that the index takes."""
        return self._index.size_bytes

    @property
    def counters(self) -> EngineCounters:
        """See Engine.counters."""
        return self._counters

    def close(self) -> None:
        """See Engine.close."""
        self._reader.shutdown()
        self.store.close()

    def _policies(self, layer: int) -> dict[AttentionPolicy, list[int]]:
        """The store's heads by the policy that they follow."""
        policies: dict[AttentionPolicy, list[int]] = {}
        for head in range(self.kv_heads):
            policies.setdefault(self.policy.at(layer, self.first_head + head), []).append(head)
        return policies

    def _attend(self, parts: list[_Part], policy: AttentionPolicy, scaling: float) -> NDArray[np.float32]:
        """Outputs (parts, H, g, d)."""
        scan = scan_of(policy, self.store.shape.dim, self.store.layout)
        try:
            if scan is not None:
                with self._counters.timed("scan"):
                    self._choose(parts, policy, scan, scaling)
            else:
                for part in parts:
                    part.groups = self._ahead(part.reads.groups, self._wanted(part))
            return np.stack([self._output(part, scaling) for part in parts])
        finally:
            wait(self._asked)  # after a failure too: the store is not read while it is written to
            self._asked.clear()

    def _choose(self, parts: list[_Part], policy: AttentionPolicy, scan: Scan, scaling: float) -> None:
        """Choose tokens part by part. What all scans need is asked for first, then a part's groups when chosen."""
        layout = self.store.layout
        channels = top_channels(torch.stack([part.q for part in parts]), scan.channels)
        places = channels.nonzero()[:, -1].reshape(*channels.shape[:2], scan.channels)
        reads = [
            (self._ahead(part.reads.index, own.numpy(), self._index), self._ahead(part.reads.tail))
            for part, own in zip(parts, places, strict=True)
        ]
        for part, mask, own, (index, tail) in zip(parts, channels, places, reads, strict=True):
            near = part.q.gather(2, own[:, None].expand(-1, part.q.shape[1], -1))
            keys = torch.from_numpy(tail.result()).float()
            scores = torch.cat([score_rows(near, index.result(), scan.form), _scores(part.q * mask[:, None], keys)], 2)
            logits = scores * logit_scales(part.q, mask, scaling)[..., None]
            probabilities = logits.softmax(dim=-1)
            tokens = part.reads.tokens
            budget = policy.numbers(tokens, part.q.shape[-1], layout).budget
            part.chosen = choose_tokens(
                logits[:, None], probabilities[:, None], torch.tensor([tokens]), torch.tensor([budget]), scan
            )[:, 0]
            part.alpha = (probabilities * part.chosen[:, None]).sum(dim=-1, keepdim=True)
            part.groups = self._ahead(part.reads.groups, self._wanted(part))

    def _wanted(self, part: _Part) -> NDArray[np.bool_]:
        """Full groups with a chosen token, (H, groups)."""
        each = self.store.layout.group_tokens
        full = part.reads.tokens // each
        return part.chosen[:, : full * each].unflatten(1, (full, each)).any(dim=-1).numpy()

    def _output(self, part: _Part, scaling: float) -> NDArray[np.float32]:
        """(H, g, d)."""
        assert part.groups is not None
        with self._counters.timed("gather"):
            groups = part.groups.result()
        with self._counters.timed("attend"):
            each, stored = self.store.layout.group_tokens, part.reads.stored
            full = stored.tokens // each
            outs = []
            for place, head in enumerate(part.reads.heads):
                chosen = part.chosen[place]
                taken = torch.cat([
                    chosen[: full * each].unflatten(0, (full, each))[groups.number[place]].flatten(),
                    chosen[full * each :],
                ])  # fmt: skip
                kv = (groups.k[place], stored.tail_k[head]), (groups.v[place], stored.tail_v[head])
                outs.append(_attend_head(part.q[place] * scaling, *kv, taken))
            mean = torch.from_numpy(stored.v_mean[part.reads.heads])[:, None]
            return (part.alpha * torch.stack(outs) + (1 - part.alpha) * mean).numpy()

    def _ahead(self, call: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> Future[_R]:
        """Have the reader do it behind what it was given before."""
        asked = self._reader.submit(call, *args, **kwargs)
        self._asked.append(asked)  # type: ignore[arg-type]
        return asked

    def _read(self, kind: PageKind, pages: Ints, keys: PageKeys) -> PageData:
        self._counters.count(kind.name.lower(), len(pages) * self.store.layout.page_bytes)
        return self.store.read(pages, keys)


def _part(reads: SequenceReads, q: Tensor) -> _Part:
    """All tokens are chosen."""
    return _Part(reads, q, torch.ones(len(q), reads.tokens, dtype=torch.bool), torch.ones(()))


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(1, 2)


def _attend_head(q: Tensor, keys: tuple, values: tuple, taken: Tensor) -> Tensor:
    """Softmax attention of scaled q (g, d) to the `taken` tokens (t,) of groups (…, n, d) and of those behind them."""
    k, v = ([torch.from_numpy(x).float().reshape(-1, q.shape[1]) for x in both] for both in (keys, values))
    logits = torch.cat([q @ x.T for x in k], dim=1)
    if not taken.all():
        logits = logits.masked_fill(~taken, -torch.inf)
    weights = logits.softmax(dim=1).split([len(x) for x in v], dim=1)
    return weights[0] @ v[0] + weights[1] @ v[1]
