"""Attention on the GPU that the model computes on: q stays there, and so do scores, choice and attention.

    q ─► index rows in GPU memory ─► chosen tokens ─► (which groups) ─► flash ─► page-locked memory ─► GPU ─► attention

Of a sequence the GPU keeps the index, the tokens that fill no group yet, and KV page groups that were read, as far as
its budget goes; what the host hears of q is which groups are wanted. The numbers are those of docs/contracts/
attention.md, 1, without its rounding to fixed point.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from itertools import pairwise
from typing import ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearflash.inference.engines.cpu_heads import takes_all
from nearflash.inference.engines.cpu_reads import Groups, SequenceReads
from nearflash.inference.engines.gpu_kernels import Partial, attend_runs, joined, score_index
from nearflash.inference.engines.gpu_memory import GpuIndex, GpuPages, GpuSuffixes, uploaded
from nearflash.inference.engines.paged import PagedEngine
from nearflash.inference.engines.softmax import AttentionForm, capped, with_sinks
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.inference.sparse.attention import choose_tokens, scan_of
from nearflash.inference.sparse.selection import logit_scales, top_dims
from nearflash.storage.kv import KvStore, StoredHead

__all__ = ["GpuEngine"]

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
        kept = None if sinks is None else uploaded(sinks, self._on)
        states = uploaded(q, self._on)
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
            parts = [part for row, number in enumerate(sequences) for part in self._parts(layer, number, row, q)]
            for part in parts:
                part.choose(form)
            for part in parts:
                out[part.row, part.reads.heads] = part.attend(form)
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
        return self._suffixes.of(stored)

    def _parts(self, layer: int, sequence: int, row: int, q: Tensor) -> list["_Rows"]:
        """The heads of a sequence by the policy that they follow."""
        stored = self.store.layer(sequence, layer)
        heads: dict[AttentionPolicy, list[int]] = {}
        for head in range(self.kv_heads):
            heads.setdefault(self._policy_at(layer, head), []).append(head)
        return [
            _Rows(self, row, SequenceReads(self.store, stored, own, self._read), q[row, own].float(), policy)
            for policy, own in heads.items()
        ]

    def _gathered(self, groups: Groups) -> Tensor:
        """Groups in the order of their tokens, (n, elements)."""
        self._joins_stream()
        places = uploaded(groups.places, self._on)
        new = uploaded(groups.new, self._on)
        data = torch.empty((len(places), self._pages.tensor.shape[1]), dtype=torch.float16, device=self._on)
        kept = places >= 0
        data[kept], data[~kept] = self._pages.tensor[places[kept]], new[-1 - places[~kept]]
        return data

    def _joins_stream(self) -> None:
        """What readers have sent is there for what follows on the model's stream."""
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
    """q (H, g, d) fp32 of heads of a sequence that follow one policy: `choose`, then `attend`."""

    def __init__(self, engine: GpuEngine, row: int, reads: SequenceReads, q: Tensor, policy: AttentionPolicy) -> None:
        self.row, self.reads = row, reads
        self._engine, self._q, self._policy = engine, q, policy
        self._stored: StoredHead = reads.stored
        self._layout = engine.store.layout
        self._suffix = engine._suffixes.of(reads.stored)[:, reads.heads]
        self._chosen: Tensor | None = None
        """Tokens, (H, S); None: all."""
        self._alpha: Tensor | None = None
        self._groups: Future[Groups]

    def choose(self, form: AttentionForm[Tensor]) -> None:
        """Choose tokens, and ask for their groups."""
        full, size = self._stored.flash_tokens // self._layout.group_tokens, self._layout.group_tokens
        wanted = np.ones((len(self._q), full), bool)
        if not takes_all(self._policy, self.reads.tokens, self._q.shape[-1], self._layout):
            self._chosen = self._choose(form)
            flash = self._chosen[:, : full * size]
            wanted = flash.unflatten(1, (full, size)).any(dim=2).cpu().numpy()
        self._groups = self.reads.groups(self._engine._ask_groups, wanted, self._engine._pages)

    def attend(self, form: AttentionForm[Tensor]) -> Tensor:
        """(H, g, d)."""
        q, stored = (self._q * form.scaling).contiguous(), self._stored
        heads, tokens, dim = q.shape[0], self._suffix.shape[2], q.shape[2]
        softcap, parts = form.softcap or 0.0, self._attend_groups(q, form)
        if tokens:
            suffix = self._suffix.contiguous().view(-1)
            each = np.arange(heads)[:, None]
            k_at, first, counts = (
                uploaded(x, q.device)
                for x in (each * tokens * dim, np.full((heads, 1), stored.flash_tokens), np.ones(heads, np.int64))
            )
            v_from = heads * tokens * dim
            parts.append(attend_runs(q, suffix, k_at, first, counts, tokens, v_from, dim, self._chosen, softcap))
        out, log_sum = joined(parts)
        sinks = None if form.sinks is None else form.sinks[self.reads.heads].float()
        if self._alpha is not None:
            mean = uploaded(stored.v_mean[self.reads.heads], q.device)[:, None]
            alpha = self._alpha.unsqueeze(-1)
            out = alpha * out + (1 - alpha) * mean
            return with_sinks(out, log_sum.unsqueeze(-1), alpha, sinks)
        return with_sinks(out, log_sum.unsqueeze(-1), None, sinks)

    def _choose(self, form: AttentionForm[Tensor]) -> Tensor:
        """The chosen tokens, (H, S)."""
        layout, tokens, q, dim = self._layout, self.reads.tokens, self._q, self._q.shape[-1]
        resolved, scan = self._policy.resolve(tokens, dim, layout), scan_of(self._policy, dim, layout)
        assert scan is not None, "a policy that does not take all"
        mask = top_dims(q, resolved.score_dims)
        part = (q * logit_scales(q, mask, form.scaling).unsqueeze(-1) * mask.unsqueeze(-2)).contiguous()
        scores = [part.new_zeros((*part.shape[:2], 0))]
        if blocks := tokens // layout.block_tokens:
            codes, factors = self._engine._index.rows(self.reads, blocks)
            dims = mask.nonzero()[:, 1].reshape(len(q), -1)
            heads = uploaded(np.array(self.reads.heads, np.int64), q.device)
            bits = layout.index_format.bits
            scores.append(score_index(part, dims, codes.contiguous(), factors.contiguous(), heads, bits))
        k = self._suffix[0] if self.reads.suffix_kept else uploaded(self.reads.suffix(), q.device)
        scores.append(part @ k.float().mT)
        logits = capped(torch.cat(scores, dim=2), form.softcap)
        probabilities = logits.softmax(dim=-1)
        count = torch.tensor([[tokens]], device=q.device)
        top_k = torch.full_like(count, resolved.top_k)
        chosen = choose_tokens(logits[:, None], probabilities[:, None], count, top_k, scan)[:, 0]
        self._alpha = (probabilities * chosen.unsqueeze(1)).sum(dim=-1)
        return chosen.contiguous()

    def _attend_groups(self, q: Tensor, form: AttentionForm[Tensor]) -> list[Partial]:
        """Attention to the groups that were asked for: those in the pool, and those that had no room there."""
        groups, layout, dim = self._groups.result(), self._layout, q.shape[-1]
        self._engine._joins_stream()
        elements = layout.group_pages * layout.page_bytes // 2
        stride, v_from = (2 * dim, dim) if layout.interleaved else (dim, layout.page_bytes // 2)
        parts = []
        for is_new in (False, True):
            spans = pairwise([0, *groups.ends.tolist()])
            own = [np.flatnonzero((groups.places[a:b] < 0) == is_new) + a for a, b in spans]
            most = max(map(len, own))
            if not most:
                continue
            k_at, first = (np.zeros((len(own), most), np.int64) for _ in range(2))
            for row, at in enumerate(own):
                places = groups.places[at]
                k_at[row, : len(at)] = (-1 - places if is_new else places) * elements
                first[row, : len(at)] = groups.number[at] * layout.group_tokens
            data = uploaded(groups.new, q.device) if is_new else self._engine._pages.tensor
            counts = np.array([len(at) for at in own], np.int64)
            runs, tokens, lengths = (uploaded(x, q.device) for x in (k_at, first, counts))
            part = attend_runs(
                q, data.view(-1), runs, tokens, lengths, layout.group_tokens, v_from, stride, self._chosen,
                form.softcap or 0.0,
            )  # fmt: skip
            parts.append(part)
        return parts
