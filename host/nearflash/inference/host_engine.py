"""Attention by the host: it reads the pages that a policy asks for, and computes in float32.

    index rows of the chosen channels ─► approximate logits ─► chosen tokens ─► their groups ─► attention

One thread reads, others compute: the groups of one sequence come while another's index is scored, or its groups are
attended to. The numbers are those of docs/attention.md, 1, without its rounding to fixed point; pages are read whole,
and checked.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearflash.abi.attend.codeword import PageKind
from nearflash.inference.engine import Engine, EngineCounters
from nearflash.inference.host_reads import SequenceReads
from nearflash.inference.index_rows import IndexMemory, score_rows
from nearflash.inference.policy import AttentionPolicy
from nearflash.inference.sparse.attention import Scan, choose_tokens, scan_of
from nearflash.inference.sparse.selection import logit_scales, top_channels
from nearflash.storage.flash.page import PageData, PageKeys
from nearflash.storage.kv import KvStore

__all__ = ["HostEngine"]

Ints = NDArray[np.int64]
_THREADS = 4
"""That compute; some of them wait for pages."""
_APART_TOKENS = 16_384
"""From here on the heads of a sequence are worked on one by one: pages of one come while another is computed."""


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
        self._workers = ThreadPoolExecutor(_THREADS, "kv-attend")

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
        with self._lock, self._counters.timed("attend"):
            work = {}
            for row, sequence in enumerate(sequences):
                stored = self.store.layer(sequence, layer)
                apart = len(sequences) == 1 or stored.tokens >= _APART_TOKENS
                for policy, heads in self._policies(layer, apart=apart):
                    reads = SequenceReads(self.store, stored, heads, self._read)
                    queries = torch.from_numpy(q[row, heads].astype(np.float32))
                    done = self._workers.submit(self._attend, reads, queries, policy, scaling)
                    work[done] = row, heads
            wait(work)  # for all, after a failure too: nothing reads the store while it is written to
            for done, place in work.items():
                out[place] = done.result()
            self._counters.heads += len(sequences) * self.kv_heads
        return out

    @property
    def memory_bytes(self) -> int:
        """Memory that the index takes."""
        return self._index.size_bytes

    @property
    def counters(self) -> EngineCounters:
        """See Engine.counters. Phase `read` is within `attend`."""
        return self._counters

    def close(self) -> None:
        """See Engine.close."""
        self._workers.shutdown()
        self._reader.shutdown()
        self.store.close()

    def _policies(self, layer: int, *, apart: bool) -> list[tuple[AttentionPolicy, list[int]]]:
        """The store's heads by the policy that they follow, or each `apart`."""
        heads: dict[tuple[AttentionPolicy, int], list[int]] = {}
        for head in range(self.kv_heads):
            heads.setdefault((self.policy.at(layer, self.first_head + head), head if apart else 0), []).append(head)
        return [(policy, own) for (policy, _), own in heads.items()]

    def _attend(self, reads: SequenceReads, q: Tensor, policy: AttentionPolicy, scaling: float) -> NDArray[np.float32]:
        """Some heads of a sequence: q (H, g, d) -> (H, g, d)."""
        stored, scan = reads.stored, scan_of(policy, self.store.shape.dim, self.store.layout)
        if scan is None:
            every = torch.ones(len(q), stored.tokens, dtype=torch.bool)
            return self._attend_chosen(reads, q, every, scaling).numpy()
        budget = policy.numbers(stored.tokens, q.shape[-1], self.store.layout).budget
        chosen, alpha = self._choose(reads, q, scan, budget, scaling)
        mean = torch.from_numpy(stored.v_mean[reads.heads])[:, None]
        return (alpha * self._attend_chosen(reads, q, chosen, scaling) + (1 - alpha) * mean).numpy()

    def _choose(
        self, reads: SequenceReads, q: Tensor, scan: Scan, budget: int, scaling: float
    ) -> tuple[Tensor, Tensor]:
        """Chosen tokens (H, S), and alpha (H, g, 1)."""
        channels = top_channels(q, scan.channels)
        places = channels.nonzero()[:, 1].reshape(len(q), scan.channels)
        index = self._reader.submit(reads.index, places.numpy(), self._index)
        tail = self._reader.submit(reads.tail)
        near = q.gather(2, places[:, None].expand(-1, q.shape[1], -1))
        scores = [score_rows(near, index.result(), scan.form)]
        scores.append(q * channels[:, None] @ torch.from_numpy(tail.result()).float().transpose(1, 2))
        logits = torch.cat(scores, dim=2) * logit_scales(q, channels, scaling)[..., None]
        probabilities = logits.softmax(dim=-1)
        counts = torch.tensor([reads.stored.tokens]), torch.tensor([budget])
        chosen = choose_tokens(logits[:, None], probabilities[:, None], *counts, scan)[:, 0]
        return chosen, (probabilities * chosen[:, None]).sum(dim=-1, keepdim=True)

    def _attend_chosen(self, reads: SequenceReads, q: Tensor, chosen: Tensor, scaling: float) -> Tensor:
        """Softmax attention over the chosen tokens (H, S)."""
        stored, each = reads.stored, self.store.layout.group_tokens
        full = stored.tokens // each
        grouped = chosen[:, : full * each].unflatten(1, (full, each))
        groups = self._reader.submit(reads.groups, grouped.any(dim=-1).numpy()).result()
        outs = []
        for place, head in enumerate(reads.heads):
            k, v = self._values(torch.from_numpy(groups.data[place]).float())
            last_k, last_v = (torch.from_numpy(tail[head]).float() for tail in (stored.tail_k, stored.tail_v))
            taken = torch.cat([grouped[place, groups.number[place]].flatten(), chosen[place, full * each :]])
            outs.append(_attend_head(q[place] * scaling, (k, last_k), (v, last_v), taken))
        return torch.stack(outs)

    def _values(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """K and V (tokens, d) in the elements (groups, …) of pages; views where the pages are full."""
        n, dim = self.store.layout.group_tokens, self.store.shape.dim
        if self.store.layout.interleaved:
            k, v = pages[:, : 2 * n * dim].unflatten(1, (n, 2, dim)).unbind(2)
        else:
            k, v = pages.unflatten(1, (2, -1))[..., : n * dim].unflatten(2, (n, dim)).unbind(1)
        return k.reshape(-1, dim), v.reshape(-1, dim)

    def _read(self, kind: PageKind, pages: Ints, keys: PageKeys) -> PageData:
        self._counters.count(kind.name.lower(), len(pages) * self.store.layout.page_bytes)
        with self._counters.timed("read"):
            return self.store.read(pages, keys)


def _attend_head(q: Tensor, k: tuple[Tensor, ...], v: tuple[Tensor, ...], taken: Tensor) -> Tensor:
    """Softmax attention of scaled q (g, d) to the `taken` (t,) of the tokens of k, and of v, one behind the other."""
    logits = torch.cat([q @ part.T for part in k], dim=1)
    if not taken.all():
        logits = logits.masked_fill(~taken, -torch.inf)
    weights = logits.softmax(dim=1).split([len(part) for part in v], dim=1)
    return weights[0] @ v[0] + weights[1] @ v[1]
