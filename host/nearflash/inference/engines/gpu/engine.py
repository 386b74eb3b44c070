"""Attention on the GPU that the model computes on: q stays there, and so do scores, choice and attention.

    q ─► index rows in GPU memory ─► chosen tokens ─► (which groups) ─► flash ─► page-locked memory ─► GPU ─► attention

Of a sequence the GPU keeps the index, the tokens that fill no group yet, and KV page groups that were read, as far as
its budget goes; what the host hears of q is which groups are wanted. The numbers are those of docs/contracts/
attention.md, 1, without its rounding to fixed point.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearflash.abi.attention.fixed_point import LOG2E
from nearflash.inference.engines.cpu.heads import takes_all
from nearflash.inference.engines.gpu.kernels import (
    Partial,
    attend_runs,
    entry_keys,
    join_parts,
    score_index,
    score_keys,
    score_query,
)
from nearflash.inference.engines.gpu.memory import GpuIndex, GpuPages, GpuSuffixes, upload, upload_together
from nearflash.inference.engines.paged.engine import PagedEngine
from nearflash.inference.engines.paged.reads import Groups, SequenceReads
from nearflash.inference.engines.paged.softmax import AttentionForm, cap, with_sinks
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.inference.sparse.attention import PROBABILITY_KEY, scan_of
from nearflash.inference.sparse.selection import choose
from nearflash.storage.kv import KvStore, StoredHead

__all__ = ["GpuEngine"]

_RUN_TOKENS = 64
"""Of what the store has in memory, attended to at once."""
_P = ParamSpec("_P")
_R = TypeVar("_R")


class GpuEngine(PagedEngine):
    """Attends on `device`, which is torch's name of a GPU (or of the CPU, under Triton's interpreter).

    `index_cache_bytes` and `page_cache_bytes` are of the device's memory.
    """

    logits_at_once = 1 << 26
    _pages: GpuPages

    def __init__(
        self, store: KvStore, policy: AttentionPolicy, device: str, *, first_head: int = 0, index_cache_bytes: int = 0,
        page_cache_bytes: int = 0, name: str = "",
    ) -> None:  # fmt: skip
        self.torch_device = self._on = torch.empty(0, device=device).device  # "cuda" has a number, as tensors say it
        pages = GpuPages(page_cache_bytes, store.layout.group_pages * store.layout.page_bytes, self._on)
        super().__init__(store, policy, first_head, name or device, pages)
        self._index = GpuIndex(index_cache_bytes, self._on)
        self._suffixes = GpuSuffixes(self._on)
        self._stream = torch.cuda.Stream(self._on) if self._on.type == "cuda" else None

    def attend(
        self, layer: int, sequences: Sequence[int], q: NDArray[np.float16], scaling: float | None = None, *,
        softcap: float | None = None, sinks: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:  # fmt: skip
        """See Engine.attend; q of the host is sent to the device."""
        kept = None if sinks is None else upload(sinks, self._on)
        states = upload(q, self._on)
        out = self.attend_tensor(layer, sequences, states, scaling, softcap=softcap, sinks=kept)
        return np.asarray(out.cpu().numpy())

    def attend_tensor(
        self, layer: int, sequences: Sequence[int], q: Tensor, scaling: float | None = None, *,
        softcap: float | None = None, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See Engine.attend: the same with tensors on `torch_device`."""
        out = torch.empty(q.shape, dtype=torch.float32, device=self._on)
        form = AttentionForm(q.shape[-1] ** -0.5 if scaling is None else scaling, softcap, sinks)
        with self._call(layer, sequences):
            if q.ndim == 5:
                for row, number in enumerate(sequences):
                    out[row] = self._several(layer, number, q[row].float(), form)
                return out
            self._choices.begin(layer, sequences)
            parts = self._parts(layer, sequences, q)
            for part in parts:
                for reads, chosen in zip(part.reads, part.choose(form), strict=True):
                    self._choices.note(layer, reads.stored.sequence, reads.heads, chosen)
            for part in parts:
                out[part.place] = part.attend(form).unflatten(0, (len(part.reads), -1))
            self._read_next(layer, sequences)
        return out

    @property
    def cache_bytes(self) -> int:
        """Memory of the device that the index and KV page groups take."""
        return self._index.size_bytes + self._pages.size_bytes

    def _share(self, sequence: int, other: int) -> None:
        """Nothing: the fork's own is sent when it is wanted."""

    def _truncate(self, sequence: int, length: int) -> None:
        self._index.truncate(sequence, length // self.store.layout.block_tokens)
        self._suffixes.drop(sequence)
        super()._truncate(sequence, length)

    def _forget(self, sequence: int) -> None:
        self._index.truncate(sequence, 0)
        self._suffixes.drop(sequence)
        super()._forget(sequence)

    def _suffix(self, stored: StoredHead) -> Tensor:
        return self._suffixes.of([stored])[0]

    def _parts(self, layer: int, sequences: Sequence[int], q: Tensor) -> list["_Rows"]:
        """The heads by the policy that they follow, of sequences of which it takes all or a part."""
        stored = [self.store.layer(number, layer) for number in sequences]
        heads: dict[AttentionPolicy, list[int]] = {}
        for head in range(self.kv_heads):
            heads.setdefault(self._policy_at(layer, head), []).append(head)
        suffixes, parts = self._suffixes.of(stored), []
        ahead = [self._take_ahead(layer, number) for number in sequences]
        for policy, heads_of_policy in heads.items():
            every = [takes_all(policy, head.tokens, q.shape[-1], self.store.layout) for head in stored]
            for whole in (False, True):
                if rows := [row for row, its in enumerate(every) if its == whole]:
                    reads = [
                        SequenceReads(self.store, stored[row], heads_of_policy, self._read, ahead[row]) for row in rows
                    ]
                    parts.append(_Rows(self, rows, reads, [suffixes[row] for row in rows], q, policy, whole))
        return parts

    def _gather(self, groups: Groups) -> Tensor:
        """Groups in the order of their tokens, (n, elements)."""
        self._joins_stream()
        places = upload(groups.places, self._on)
        new = upload(groups.new, self._on)
        data = torch.empty((len(places), self._pages.tensor.shape[1]), dtype=torch.float16, device=self._on)
        kept = places >= 0
        data[kept], data[~kept] = self._pages.tensor[places[kept]], new[-1 - places[~kept]]
        return data

    def _joins_stream(self) -> None:
        """Make the model's stream wait for what readers have sent."""
        if self._stream is not None:
            torch.cuda.current_stream(self._on).wait_stream(self._stream)

    def _ask_groups(self, call: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> Future[_R]:
        """Have a reader do it; what it sends goes by a stream of its own."""
        if self._stream is not None:
            # A place of the pool may still be read by the model's stream: what is sent waits for that.
            self._stream.wait_stream(torch.cuda.current_stream(self._on))

        def read() -> _R:
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                return call(*args, **kwargs)

        return super()._ask_groups(read)


class _Rows:
    """q of the heads of sequences that follow one policy and are read in full, or not: `choose`, then `attend`.

    rows of q: which sequences; n = (sequences, heads) is what is computed at once. suffixes (2, kv_heads, u, d): the
    tokens of each sequence that the store has in memory.
    """

    def __init__(
        self, engine: GpuEngine, rows: list[int], reads: list[SequenceReads], suffixes: list[Tensor], q: Tensor,
        policy: AttentionPolicy, takes_all: bool,
    ) -> None:  # fmt: skip
        self.reads, self._suffixes = reads, suffixes
        self._heads = reads[0].heads
        whole = len(rows) == len(q) and len(self._heads) == q.shape[1]
        self.place: Any = ... if whole else np.ix_(rows, self._heads)
        """Of these rows and heads in q."""
        self._engine, self._q, self._policy = engine, q[self.place].float().flatten(0, 1).contiguous(), policy
        self._layout, self._takes_all = engine.store.layout, takes_all
        self._chosen: Tensor | None = None
        """Entries, (n, E); None: all."""
        self._alpha: Tensor | None = None
        self._groups: list[Future[Groups]]

    def choose(self, form: AttentionForm[Tensor]) -> list[NDArray[np.bool_]]:
        """Choose tokens, and ask for their groups: those of each sequence, (heads, full groups)."""
        size = self._layout.group_tokens
        full = [reads.stored.flash_tokens // size for reads in self.reads]
        wanted = np.ones((len(self.reads), len(self._heads), max(full)), bool)
        if not self._takes_all:
            self._chosen = self._choose(form)
            entries = size // self._policy.entry_tokens(self._layout)
            flash = self._chosen[:, : max(full) * entries]
            flash = flash if entries == 1 else flash.unflatten(1, (max(full), entries)).any(dim=2)
            wanted = flash.cpu().numpy().reshape(wanted.shape)
        of_sequences = [chosen[:, :count] for chosen, count in zip(wanted, full, strict=True)]
        self._groups = [
            reads.groups(self._engine._ask_groups, chosen, self._engine._pages)
            for reads, chosen in zip(self.reads, of_sequences, strict=True)
        ]
        return of_sequences

    def attend(self, form: AttentionForm[Tensor]) -> Tensor:
        """(n, g, d)."""
        q = self._q * form.scaling
        out, log_sum = join_parts(self._attend_groups(q, form.softcap or 0.0))
        sinks = None if form.sinks is None else form.sinks[self._heads].float().repeat(len(self.reads), 1)
        if self._alpha is None:
            return with_sinks(out, log_sum.unsqueeze(-1), None, sinks)
        alpha = self._alpha.unsqueeze(-1)
        mean = np.concatenate([reads.stored.v_mean[self._heads] for reads in self.reads])
        out = alpha * out + (1 - alpha) * upload(mean, q.device)[:, None]
        return with_sinks(out, log_sum.unsqueeze(-1), alpha, sinks)

    def _choose(self, form: AttentionForm[Tensor]) -> Tensor:
        """The chosen entries, (n, E)."""
        layout, q, dim, index = self._layout, self._q, self._q.shape[-1], self._engine._index
        scan, tokens = scan_of(self._policy, dim, layout), [reads.tokens for reads in self.reads]
        assert scan is not None, "a policy that does not take all"
        part, dims = score_query(q, scan.score_dims, form.scaling)
        scores = part.new_full((*part.shape[:2], max(tokens)), -torch.inf)
        blocks = [count // layout.block_tokens for count in tokens]
        resolved = [self._policy.resolve(count, dim, layout) for count in tokens]
        rows = [index.rows(reads, count) if count else () for reads, count in zip(self.reads, blocks, strict=True)]
        later = [
            suffix[0] if reads.suffix_kept else self._read_unindexed(reads)
            for reads, suffix in zip(self.reads, self._suffixes, strict=True)
        ]
        codes_at, factors_at, k_at, whole, first, counts, top_k, ends, windows = upload_together(
            q.device, *(self._at(row[part] if row else None for row in rows) for part in range(2)), self._at(later),
            *map(self._of_heads, (
                blocks, [count * layout.block_tokens for count in blocks], [k.shape[1] for k in later],
                [its.top_k for its in resolved], tokens, [its.local_window for its in resolved],
            )),
        )  # fmt: skip
        if any(blocks):
            bits = layout.index_format.bits
            score_index(part, dims, codes_at, factors_at, whole, layout.block_tokens, bits, scores)
        if most := max(k.shape[1] for k in later):
            score_keys(part, k_at, first, counts, most, scores)
        logits = scores
        if form.softcap is not None:  # what is no token stays so
            logits = cap(scores, form.softcap).masked_fill(scores == -torch.inf, -torch.inf)
        ranked, factor = (None, PROBABILITY_KEY) if scan.by_probability else (logits, LOG2E)
        keys, weights, shares = entry_keys(logits.softmax(dim=-1), ranked, ends, windows, scan.entry_tokens, factor)
        chosen = choose(keys, top_k, weights, scan.top_p)
        self._alpha = (shares * chosen.unsqueeze(1)).sum(dim=-1)
        return chosen

    def _read_unindexed(self, reads: SequenceReads) -> Tensor:
        """K (kv_heads, t, d) of the tokens after the whole index blocks, some of them on flash."""
        k = reads.suffix()
        every = np.zeros((self._engine.kv_heads, *k.shape[1:]), k.dtype)
        every[self._heads] = k
        return upload(every, self._q.device)

    def _attend_groups(self, q: Tensor, softcap: float) -> list[Partial]:
        """Attention to the groups that were asked for, and to what the store has in memory."""
        layout, dim, flat = self._layout, q.shape[-1], self._of_heads
        groups = [asked.result() for asked in self._groups]
        self._engine._joins_stream()
        new = [upload(row.new, q.device) if (row.places < 0).any() else None for row in groups]
        suffix_runs = [-(-suffix.shape[2] // _RUN_TOKENS) for suffix in self._suffixes]
        ends = flat([reads.tokens for reads in self.reads])
        of_groups = self._group_runs(groups, new)
        number = np.arange(max(suffix_runs))
        of_suffixes = (
            self._at(suffix[0] for suffix in self._suffixes)[:, None] + number * (2 * _RUN_TOKENS * dim),
            flat([suffix.stride(0) for suffix in self._suffixes]),
            flat([reads.stored.flash_tokens for reads in self.reads])[:, None] + number * _RUN_TOKENS,
            flat(suffix_runs),
        )
        sent = upload_together(q.device, *of_groups, *of_suffixes, ends)
        parts, limit, entry = [], sent.pop(), self._policy.entry_tokens(layout)
        of_both = (sent[:4], layout.group_tokens, layout.steps(dim)[0]), (sent[4:], _RUN_TOKENS, dim)
        for (k_at, behind, first, counts), stride, step in of_both:
            if k_at.shape[1]:
                part = attend_runs(q, k_at, behind, first, counts, limit, stride, step, self._chosen, entry, softcap)
                parts.append(part)
        return parts

    def _group_runs(self, groups: list[Groups], new: list[Tensor | None]) -> tuple[NDArray[np.int64], ...]:
        """Arguments of attend_runs: k_at, v_from, first and counts of KV page groups."""
        pages, layout = self._engine._pages.tensor, self._layout
        size = layout.group_pages * layout.page_bytes
        spans = [np.diff([0, *row.ends.tolist()]) for row in groups]
        counts = np.concatenate(spans)
        k_at, first = (np.zeros((len(counts), int(counts.max(initial=0))), np.int64) for _ in range(2))
        rows = np.repeat(np.arange(len(counts)), counts)
        run = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        at = [
            np.where(row.places < 0, (-1 - row.places) * size + (0 if read is None else read.data_ptr()),
                     row.places * size + pages.data_ptr())
            for row, read in zip(groups, new, strict=True)
        ]  # fmt: skip
        k_at[rows, run] = np.concatenate(at)
        first[rows, run] = np.concatenate([row.number for row in groups]) * layout.group_tokens
        return k_at, np.full(len(counts), layout.steps(self._q.shape[-1])[1], np.int64), first, counts

    def _of_heads(self, values: Sequence[int]) -> NDArray[np.int64]:
        """Numbers of the sequences for each of their heads, (n,)."""
        return np.repeat(np.array(values, np.int64), len(self._heads))

    def _at(self, tensors: Iterable[Tensor | None]) -> NDArray[np.int64]:
        """Addresses of the heads' parts of each sequence's tensor (kv_heads, …), (n,); 0 where there is none."""
        return np.array(
            [
                0 if tensor is None else tensor.data_ptr() + head * tensor.stride(0) * tensor.itemsize
                for tensor in tensors
                for head in self._heads
            ],
            np.int64,
        )
