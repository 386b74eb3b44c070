"""Attention on the CPU: it reads the pages that a policy asks for, and computes in float32.

    index rows of the chosen dims ─► approximate logits ─► chosen tokens ─► their groups ─► attention

Several tokens of a sequence attend to all tokens before them: every page is read once for all of them.

Threads of its own read: the groups of one sequence come while another's index is scored, or its groups are attended
to. The numbers are those of docs/contracts/attention.md, 1, without its rounding to fixed point; pages are read whole,
and checked.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearflash.inference.engines.base import EngineCounters
from nearflash.inference.engines.cpu.heads import Heads, dims_by_size, takes_all
from nearflash.inference.engines.cpu.kernels import attend_memory, load_loops
from nearflash.inference.engines.cpu.predicted_heads import PredictedHeads, choose_predicted_groups
from nearflash.inference.engines.paged.compact_index import CompactIndex
from nearflash.inference.engines.paged.engine import PagedEngine
from nearflash.inference.engines.paged.index_rows import IndexCache
from nearflash.inference.engines.paged.page_cache import PageCache
from nearflash.inference.engines.paged.reads import Groups, SequenceReads
from nearflash.inference.engines.paged.softmax import AttentionForm
from nearflash.inference.policy.policy import AttentionMode, AttentionPolicy
from nearflash.storage.kv import KvStore, StoredHead

__all__ = ["CpuEngine"]

F32 = NDArray[np.float32]
_P = ParamSpec("_P")
_R = TypeVar("_R")
_APART_TOKENS = 16_384
"""From here on each head of a single sequence is a part of its own: the groups of one come while another is scored or
computed. Of several sequences each is a part: its reads are one queue."""
_THREADS = len(os.sched_getaffinity(0))
"""That compute, where memory has what they need. (Where it is read they were a fifth slower than one, on two cores.)"""


class CpuEngine(PagedEngine):
    """Attends by the policy to what the store holds.

    What was read stays in memory: of the index up to `index_cache_bytes`, of KV page groups up to `page_cache_bytes`.
    read_ahead: the groups that predicted queries choose are read before those of q itself, which attention waits for;
    policy kvswap always does so. Results are the same but for the order of sums, as with other sizes of these caches.
    """

    def __init__(
        self,
        store: KvStore,
        policy: AttentionPolicy,
        *,
        first_head: int = 0,
        index_cache_bytes: int = 0,
        page_cache_bytes: int = 0,
        read_ahead: bool = False,
        name: str = "cpu",
    ) -> None:
        pages = PageCache(page_cache_bytes, store.layout.group_pages * store.layout.page_bytes)
        load_loops()  # what they lack is named now, not by a thread
        super().__init__(store, policy, first_head, name, pages)
        self._index = IndexCache(index_cache_bytes)
        self._reads_ahead = read_ahead
        self._forms: dict[int, AttentionForm[F32]] = {}
        """Of each layer's last call."""
        self._reader = ThreadPoolExecutor(1, "kv-index")
        """Reads index pages, in the order in which they are asked for: what it read is kept for the next one."""
        self._workers = ThreadPoolExecutor(max(_THREADS - 1, 1), "kv-attend")
        self._tails: dict[int, bool] = {}
        self._compact = CompactIndex(store.layout.block_tokens)
        """Of policy kvswap, whatever `index_cache_bytes`."""
        self._predicted: dict[tuple[int, int], F32] = {}
        """q (H, g, d) of a coming call, by layer and sequence."""

    def attend(
        self, layer: int, sequences: Sequence[int], q: NDArray[np.float16], scaling: float | None = None, *,
        softcap: float | None = None, sinks: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:  # fmt: skip
        """See Engine.attend."""
        out = np.empty(q.shape, np.float32)
        predicted = [self._predicted.pop((layer, number), None) for number in sequences]
        form = AttentionForm(q.shape[-1] ** -0.5 if scaling is None else scaling, softcap, sinks)
        with self._call(layer, sequences):
            if q.ndim == 5:
                for row, number in enumerate(sequences):
                    out[row] = self._several(layer, number, torch.from_numpy(q[row].astype(np.float32)), form).numpy()
                return out
            self._choices.begin(layer, sequences)
            # Everything that scores need is asked for first; then each part's groups, as soon as they are chosen.
            rows = [
                row for row, number in enumerate(sequences)
                if not self._attend_memory(layer, number, q[row], form, out[row])
            ]  # fmt: skip
            self._forms[layer] = form
            if rows and self.policy.mode is AttentionMode.KVSWAP:
                self._attend_parts(
                    [self._part_of_all_heads(layer, sequences, row, q, predicted[row]) for row in rows], form, out
                )
            elif rows:
                self._attend_parts(self._parts(layer, sequences, rows, q), form, out)
            # By predictions more is known, but of the first layer, which none is before.
            self._read_next(layer, sequences, first_only=self.takes_predictions)
        return out

    @property
    def takes_predictions(self) -> bool:
        """See Engine.takes_predictions."""
        return self._reads_ahead or self.policy.mode is AttentionMode.KVSWAP

    def predict(self, layer: int, sequences: Sequence[int], q: NDArray[np.float32]) -> None:
        """See Engine.predict."""
        if not self.takes_predictions:
            super().predict(layer, sequences, q)
        with self._lock:
            for number, own in zip(sequences, q, strict=True):
                self._predicted[layer, number] = own
                if self.policy.mode is AttentionMode.KVSWAP:
                    self._read_predicted(layer, number, own)
                elif layer in self._forms:
                    self._read_ahead(layer, number, own, self._forms[layer])

    @property
    def cache_bytes(self) -> int:
        """Memory that the index and KV page groups take."""
        return self._index.size_bytes + self._pages.size_bytes + self._compact.size_bytes

    @property
    def counters(self) -> EngineCounters:
        """See Engine.counters. Phase `read` is beside `attend`: of all reads, of which several may be under way."""
        return self._counters

    def close(self) -> None:
        """See Engine.close."""
        self._reader.shutdown()
        self._workers.shutdown()
        super().close()

    def _share(self, sequence: int, other: int) -> None:
        self._index.share(sequence, other)
        self._compact.share(sequence, other)

    def _truncate(self, sequence: int, length: int) -> None:
        for index in (self._index, self._compact):
            index.truncate(sequence, length // self.store.layout.block_tokens)
        super()._truncate(sequence, length)

    def _forget(self, sequence: int) -> None:
        self._index.drop(sequence)
        self._compact.drop(sequence)
        super()._forget(sequence)

    def _drop_ahead(self, sequence: int) -> None:
        super()._drop_ahead(sequence)
        for key in [key for key in self._predicted if key[1] == sequence]:
            del self._predicted[key]

    def _gather(self, groups: Groups) -> Tensor:
        return torch.from_numpy(groups.gather())

    def _suffix(self, stored: StoredHead) -> Tensor:
        return torch.from_numpy(np.stack([stored.suffix_k, stored.suffix_v]))

    def _attend_memory(
        self, layer: int, sequence: int, q: NDArray[np.float16], form: AttentionForm[F32], out: NDArray[np.float32]
    ) -> bool:
        """Attend to a sequence whose tokens are all in memory and all taken; False where that is not so."""
        found = self.store.memory(sequence, layer)
        if found is None or not self._takes_tail(layer):
            return False
        suffixes, tokens = found
        keys, values = suffixes[:, layer]
        attend_memory(np.ascontiguousarray(q), keys, values, tokens, form, out)
        return True

    def _attend_parts(self, parts: list[Heads], form: AttentionForm[F32], out: NDArray[np.float32]) -> None:
        """Attend to parts, by several threads where KV page groups are kept, so that few are read."""

        def attend(own: list[Heads]) -> None:
            for part in own:
                chosen = part.choose(self._ask_groups, self._pages, form)
                stored = part.reads.stored
                self._choices.note(stored.page_tag.layer, stored.sequence, part.reads.heads, chosen)
            for part in own:
                out[part.row, part.reads.heads] = part.attend(form)

        threads = min(_THREADS, len(parts)) if self._pages.keeps else 1
        others = [self._workers.submit(attend, parts[first::threads]) for first in range(1, threads)]
        try:
            attend(parts[::threads])
        finally:
            wait(others)
        for done in others:
            done.result()

    def _takes_tail(self, layer: int) -> bool:
        """Whether all heads of a layer take all tokens after the last whole index block."""
        if layer not in self._tails:
            policies = [self._policy_at(layer, head) for head in range(self.kv_heads)]
            self._tails[layer] = all(one.mode is AttentionMode.DENSE or one.takes_suffix for one in policies)
        return self._tails[layer]

    def _read_ahead(self, layer: int, sequence: int, predicted: F32, form: AttentionForm[F32]) -> None:
        """Begin to read what the policy would choose by predicted queries."""
        stored, layout = self.store.layer(sequence, layer), self.store.layout
        if not stored.flash_tokens:
            return
        order, full = dims_by_size(predicted.astype(np.float16)), stored.flash_tokens // layout.group_tokens

        def choose() -> NDArray[np.bool_]:
            chosen = np.zeros((self.kv_heads, full), bool)
            for (policy, _), own in self._heads_by_policy(layer, apart=False).items():
                reads = SequenceReads(self.store, stored, own, self._read)
                part = Heads(0, reads, predicted[own], order[own], policy, layout)
                chosen[own] = part.predict_groups(self._index, form)
            return chosen

        self._begin_ahead(layer, stored, stored.tokens + 1, choose)

    def _read_predicted(self, layer: int, sequence: int, predicted: F32) -> None:
        """Begin to read what policy kvswap will choose when the sequence has one token more."""
        stored, layout = self.store.layer(sequence, layer), self.store.layout
        tokens, every = stored.tokens + 1, list(range(self.kv_heads))
        if takes_all(self.policy, tokens, predicted.shape[-1], layout) or tokens % layout.block_tokens == 0:
            return  # the new token's block is not stored yet
        reads = SequenceReads(self.store, stored, every, self._read)

        def choose() -> NDArray[np.bool_]:
            chosen = choose_predicted_groups(reads, tokens, predicted, self.policy, layout, self._compact)
            return np.broadcast_to(chosen, (len(every), len(chosen)))

        self._begin_ahead(layer, stored, tokens, choose)

    def _part_of_all_heads(
        self, layer: int, sequences: Sequence[int], row: int, q: NDArray[np.float16], predicted: F32 | None
    ) -> Heads:
        """All heads of one sequence, by policy kvswap."""
        stored, ahead = self.store.layer(sequences[row], layer), self._take_ahead(layer, sequences[row])
        reads = self._reads_of_all(stored, ahead)
        wide = q[row].astype(np.float32)
        return PredictedHeads(row, reads, wide, predicted, self.policy, self.store.layout, self._compact)

    def _parts(self, layer: int, sequences: Sequence[int], rows: list[int], q: NDArray[np.float16]) -> list[Heads]:
        """The heads of sequences by the policy that they follow; what their scores need is asked for."""
        wide, order = q.astype(np.float32), dims_by_size(q)
        parts = []
        for row in rows:
            stored = self.store.layer(sequences[row], layer)
            apart = len(sequences) == 1 and stored.tokens >= _APART_TOKENS
            ahead = self._take_ahead(layer, sequences[row])
            for (policy, _), own in self._heads_by_policy(layer, apart=apart).items():
                reads = SequenceReads(self.store, stored, own, self._read, ahead)
                part = Heads(row, reads, wide[row, own], order[row, own], policy, self.store.layout)
                part.ask(self._ask, self._index)
                parts.append(part)
        return parts

    def _heads_by_policy(self, layer: int, *, apart: bool) -> dict[tuple[AttentionPolicy, int], list[int]]:
        """Heads of a layer that follow one policy; each by itself where they are `apart`."""
        heads: dict[tuple[AttentionPolicy, int], list[int]] = {}
        for head in range(self.kv_heads):
            heads.setdefault((self._policy_at(layer, head), head * apart), []).append(head)
        return heads

    def _ask(self, call: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> Future[_R]:
        """Have the reader of index pages do it after what it was asked for before."""
        return self._submit(self._reader, call, *args, **kwargs)
