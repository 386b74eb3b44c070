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

from nearflash.abi.errors import ShapeError
from nearflash.inference.engines import kernels
from nearflash.inference.engines.base import EngineCounters
from nearflash.inference.engines.cpu_heads import AttentionForm, Heads
from nearflash.inference.engines.cpu_reads import Groups, SequenceReads
from nearflash.inference.engines.index_rows import IndexCache
from nearflash.inference.engines.page_cache import PageCache
from nearflash.inference.engines.softmax import OnlineSoftmax
from nearflash.inference.engines.store import StoreEngine
from nearflash.inference.policy.policy import AttentionMode, AttentionPolicy
from nearflash.storage.kv import KvStore

__all__ = ["CpuEngine"]

Ints = NDArray[np.int64]
_NO_SINKS = np.zeros((0, 0), np.float32)
_P = ParamSpec("_P")
_R = TypeVar("_R")
_LOGITS = 1 << 24
"""At once, where several tokens attend: what bounds the memory of a call."""
_APART_TOKENS = 16_384
"""From here on each head of a single sequence is a part of its own: the groups of one come while another is scored or
computed. Of several sequences each is a part: its reads are one queue."""
_THREADS = len(os.sched_getaffinity(0))
"""That compute, where memory has what they need. (Where it is read they were a fifth slower than one, on two cores.)"""
_READERS = 4
"""Threads that wait for KV page groups, each for those of a part."""


class CpuEngine(StoreEngine):
    """Attends by the policy to what the store holds.

    What was read stays in memory: of the index up to `index_cache_bytes`, of KV page groups up to `page_cache_bytes`.
    """

    def __init__(
        self,
        store: KvStore,
        policy: AttentionPolicy,
        *,
        first_head: int = 0,
        index_cache_bytes: int = 0,
        page_cache_bytes: int = 0,
        name: str = "cpu",
    ) -> None:
        super().__init__(store, policy, first_head, name)
        self._index = IndexCache(index_cache_bytes)
        self._groups = PageCache(page_cache_bytes, store.layout.group_pages * store.layout.page_bytes)
        self._reader = ThreadPoolExecutor(1, "kv-index")
        """Reads index pages, in the order in which they are asked for: what it read is kept for the next one."""
        self._readers = ThreadPoolExecutor(_READERS, "kv-pages")
        self._workers = ThreadPoolExecutor(max(_THREADS - 1, 1), "kv-attend")
        self._asked: list[Future[object]] = []
        self._tails: dict[int, bool] = {}

    def attend(
        self, layer: int, sequences: Sequence[int], q: NDArray[np.float16], scaling: float | None = None, *,
        softcap: float | None = None, sinks: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:  # fmt: skip
        """See Engine.attend."""
        out = np.empty(q.shape, np.float32)
        form = AttentionForm(q.shape[-1] ** -0.5 if scaling is None else scaling, softcap, sinks)
        with self._lock, self._counters.timed("attend"):
            self._groups.begin(layer, sequences)
            try:
                if q.ndim == 5:
                    for row, number in enumerate(sequences):
                        out[row] = self._several(layer, number, torch.from_numpy(q[row].astype(np.float32)), form)
                    return out
                # Everything that scores need is asked for first; then each part's groups, as soon as they are chosen.
                parts: list[Heads] = []
                for row, number in enumerate(sequences):
                    if not self._attend_memory(layer, number, q[row], form, out[row]):
                        parts += self._parts(layer, number, row, q, alone=len(sequences) == 1)
                if not parts:
                    return out
                self._each(parts, lambda part: part.choose(self._ask_groups, self._groups, form))

                def attend(part: Heads) -> None:
                    out[part.row, part.reads.heads] = part.attend(form)

                self._each(parts, attend)
            finally:
                if self._asked:
                    wait(self._asked)  # after a failure too: the store is not read while it is written to
                    self._asked.clear()
                self._counters.heads += len(sequences) * self.kv_heads
        return out

    @property
    def cache_bytes(self) -> int:
        """Memory that the index and KV page groups take."""
        return self._index.size_bytes + self._groups.size_bytes

    @property
    def counters(self) -> EngineCounters:
        """See Engine.counters. Phase `read` is beside `attend`: of all reads, of which several may be under way."""
        return self._counters

    def close(self) -> None:
        """See Engine.close."""
        self._reader.shutdown()
        self._readers.shutdown()
        self._workers.shutdown()
        super().close()

    def _share(self, sequence: int, other: int) -> None:
        self._index.share(sequence, other)

    def _truncate(self, sequence: int, length: int) -> None:
        layout = self.store.layout
        self._index.truncate(sequence, length // layout.block_tokens)
        self._groups.truncate(sequence, length // layout.group_tokens)

    def _forget(self, sequence: int) -> None:
        self._index.drop(sequence)
        self._groups.drop(sequence)

    def _attend_memory(
        self, layer: int, sequence: int, q: NDArray[np.float16], form: AttentionForm, out: NDArray[np.float32]
    ) -> bool:
        """Attend to a sequence whose tokens are all in memory and all taken; False where that is not so."""
        found = self.store.memory(sequence, layer)
        if found is None or not self._takes_tail(layer):
            return False
        suffixes, tokens = found
        sinks = _NO_SINKS if form.sinks is None else form.sinks
        softcap = np.float32(form.softcap or 0.0)
        kernels.attend_memory(
            q.view(np.uint16), suffixes.view(np.uint16), layer, tokens, np.float32(form.scaling), softcap, sinks, out
        )
        return True

    def _each(self, parts: list[Heads], call: Callable[[Heads], None]) -> None:
        """Call for each part; several at once where KV page groups are kept, so that few are read."""

        def some(first: int) -> None:
            for part in parts[first::threads]:
                call(part)

        threads = max(min(_THREADS, len(parts)), 1) if self._groups.keeps else 1
        others = [self._workers.submit(some, first) for first in range(1, threads)]
        try:
            some(0)
        finally:
            wait(others)
        for done in others:
            done.result()

    def _takes_tail(self, layer: int) -> bool:
        """Whether all heads of a layer take all tokens after the last whole index block."""
        if layer not in self._tails:
            policies = [self._policy_at(layer, head) for head in range(self.kv_heads)]
            self._tails[layer] = all(one.mode is AttentionMode.DENSE or one.keep_tail for one in policies)
        return self._tails[layer]

    def _parts(self, layer: int, sequence: int, row: int, q: NDArray[np.float16], *, alone: bool) -> list[Heads]:
        """The heads of a sequence by the policy that they follow; what their scores need is asked for."""
        stored = self.store.layer(sequence, layer)
        apart = alone and stored.tokens >= _APART_TOKENS
        heads: dict[tuple[AttentionPolicy, int], list[int]] = {}
        for head in range(self.kv_heads):
            heads.setdefault((self._policy_at(layer, head), head * apart), []).append(head)
        parts = []
        for (policy, _), own in heads.items():
            reads = SequenceReads(self.store, stored, own, self._read)
            part = Heads(row, reads, q[row, own].astype(np.float32), policy, self.store.layout)
            part.ask(self._ask, self._index)
            parts.append(part)
        return parts

    def _several(self, layer: int, sequence: int, q: Tensor, form: AttentionForm) -> NDArray[np.float32]:
        """(H, t, g, d) of q, alike, of the sequence's last t tokens: dense."""
        stored, layout = self.store.layer(sequence, layer), self.store.layout
        heads, new, group, _ = q.shape
        if new > stored.tokens:
            raise ShapeError(f"q must be of at most the {stored.tokens} tokens that sequence {sequence} has, not {new}")
        reads = SequenceReads(self.store, stored, list(range(heads)), self._read)
        full = stored.flash_tokens // layout.group_tokens
        most = max(_LOGITS // (heads * new * group * layout.group_tokens), 1)
        parts = [range(first, min(first + most, full)) for first in range(0, full, most)]
        softmax = OnlineSoftmax(
            q * form.scaling, stored.tokens, form.softcap, None if form.sinks is None else torch.from_numpy(form.sinks)
        )

        def ask(groups: range) -> Future[Groups]:
            return reads.groups(self._ask_groups, np.ones((heads, len(groups)), bool), self._groups, groups.start)

        asked = [ask(groups) for groups in parts[:1]]
        for number, groups in enumerate(parts):
            if number + 1 < len(parts):
                asked.append(ask(parts[number + 1]))  # the next part is read while this one is computed
            pages = torch.from_numpy(asked.pop(0).result().gathered()).float().unflatten(0, (heads, len(groups)))
            softmax.add(*self._values(pages), groups.start * layout.group_tokens)
        k, v = (torch.from_numpy(suffix).float() for suffix in (stored.suffix_k, stored.suffix_v))
        softmax.add(k, v, stored.flash_tokens)
        return softmax.result().numpy()

    def _ask(self, call: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> Future[_R]:
        """Have the reader of index pages do it after what it was asked for before."""
        return self._asked_of(self._reader, call, *args, **kwargs)

    def _ask_groups(self, call: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> Future[_R]:
        """Have a reader of KV page groups do it."""
        return self._asked_of(self._readers, call, *args, **kwargs)

    def _asked_of(
        self, readers: ThreadPoolExecutor, call: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs
    ) -> Future[_R]:
        asked = readers.submit(call, *args, **kwargs)
        self._asked.append(asked)  # type: ignore[arg-type]
        return asked
