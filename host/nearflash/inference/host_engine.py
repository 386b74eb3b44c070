"""Attention by the host: it reads the pages that a policy asks for, and computes in float32.

    index pages of the chosen channels ─► approximate logits ─► chosen tokens ─► their pages ─► attention

The numbers are those of docs/attention.md, 1, without its rounding to fixed point; pages are read whole, and checked.
"""

import threading
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearflash.abi.attend.codeword import PageKind
from nearflash.abi.attend.pages import IndexFormat
from nearflash.inference.engine import Engine, EngineCounters
from nearflash.inference.policy import AttentionPolicy
from nearflash.inference.sparse.attention import Scan, attend_chosen, choose_tokens, scan_of
from nearflash.inference.sparse.selection import logit_scales, top_channels
from nearflash.inference.stored_rows import Ints, StoredRows
from nearflash.storage.flash.page import PageData, PageKeys
from nearflash.storage.kv import KvStore

__all__ = ["HostEngine"]


class HostEngine(Engine):
    """Attends by the policy to what the store holds, all heads and sequences of a call together.

    `first_head` is the number, in the model, of the store's first KV head: overrides of the policy go by that. The
    store is the engine's own from now on.
    """

    def __init__(self, store: KvStore, policy: AttentionPolicy, *, first_head: int = 0, name: str = "host") -> None:
        self.store, self.policy, self.first_head, self.name = store, policy, first_head, name
        self.kv_heads = store.shape.kv_heads
        self._counters = EngineCounters()
        self._lock = threading.Lock()

    def add(self) -> int:
        """See Engine.add."""
        with self._lock:
            return self.store.add()

    def free(self, sequence: int) -> None:
        """See Engine.free."""
        with self._lock:
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
            for policy, heads in self._policies(layer).items():
                rows = StoredRows.of(self.store, sequences, layer, heads)
                queries = torch.from_numpy(q[:, heads].astype(np.float32)).flatten(0, 1)
                out[:, heads] = self._attend(rows, queries, policy, scaling).reshape(q[:, heads].shape)
            self._counters.heads += len(sequences) * self.kv_heads
        return out

    @property
    def counters(self) -> EngineCounters:
        """See Engine.counters."""
        return self._counters

    def close(self) -> None:
        """See Engine.close."""
        self.store.close()

    def _policies(self, layer: int) -> dict[AttentionPolicy, list[int]]:
        """The store's heads by the policy that they follow."""
        policies: dict[AttentionPolicy, list[int]] = {}
        for head in range(self.kv_heads):
            policies.setdefault(self.policy.at(layer, self.first_head + head), []).append(head)
        return policies

    def _attend(self, rows: StoredRows, q: Tensor, policy: AttentionPolicy, scaling: float) -> NDArray[np.float32]:
        """q (N, g, d) -> (N, g, d)."""
        layout, dim = self.store.layout, q.shape[-1]
        each = layout.group_tokens
        groups = -(-int(rows.tokens.max()) // each)
        valid = torch.from_numpy(np.arange(groups * each) < rows.tokens[:, None])
        scan = scan_of(policy, dim, layout)
        chosen, alpha = valid, torch.ones(())
        if scan is not None:
            budget = [policy.numbers(int(tokens), dim, layout).budget for tokens in rows.tokens]
            with self._counters.timed("scan"):
                chosen, alpha = self._choose(rows, q, valid, torch.tensor(budget), scan, scaling)
        with self._counters.timed("gather"):
            wanted = chosen.unflatten(1, (groups, each)).any(dim=-1).numpy()
            got = rows.groups(self.store, wanted, self._read, values=True)
        with self._counters.timed("attend"):
            place = torch.from_numpy(np.maximum(got.number, 0))[..., None] * each + torch.arange(each)
            taken = chosen.gather(1, place.flatten(1)) & torch.from_numpy(got.number >= 0).repeat_interleave(each, 1)
            k, v = (torch.from_numpy(x).flatten(1, 2).float() for x in (got.k, got.v))
            out = attend_chosen(q[:, None], k, v, taken[:, None], scaling)[:, 0]
            mean = torch.from_numpy(rows.v_mean)[:, None]
            return (alpha * out + (1 - alpha) * mean).numpy()

    def _choose(
        self, rows: StoredRows, q: Tensor, valid: Tensor, budget: Tensor, scan: Scan, scaling: float
    ) -> tuple[Tensor, Tensor]:
        """The tokens that are read (N, S), and alpha (N, g, 1)."""
        channels = top_channels(q, scan.channels)
        part = q * channels[:, None]
        tokens, size = torch.from_numpy(rows.tokens)[:, None], valid.shape[1]
        scores = torch.zeros(*q.shape[:2], size + self.store.layout.group_tokens)  # behind: what no slot is for
        self._score_index(rows, part, channels, scan, scores)
        self._score_tail(rows, part, scan, scores)
        logits = scores[..., :size] * logit_scales(q, channels, scaling)[..., None]
        logits = logits.masked_fill(~valid[:, None], -torch.inf)
        probabilities = logits.softmax(dim=-1)
        chosen = choose_tokens(logits[:, None], probabilities[:, None], tokens, budget[:, None], scan)[:, 0] & valid
        return chosen, (probabilities * chosen[:, None]).sum(dim=-1, keepdim=True)

    def _score_index(self, rows: StoredRows, part: Tensor, channels: Tensor, scan: Scan, scores: Tensor) -> None:
        """Scores of whole blocks, from the rows of the chosen channels."""
        layout = self.store.pages.index_layout
        blocks = rows.tokens // scan.block_tokens
        if not (most := int(blocks.max())):
            return
        chosen = channels.nonzero()[:, 1].reshape(len(channels), scan.channels).numpy()
        page, line = np.divmod(chosen, layout.rows)
        wanted = np.zeros((len(chosen), most, layout.pages), bool)
        np.put_along_axis(wanted, np.broadcast_to(page[:, None], (len(chosen), most, scan.channels)), True, axis=2)
        wanted &= (np.arange(most) < blocks[:, None])[..., None]
        slots, read = rows.index(self.store, wanted.reshape(len(chosen), -1), self._read)
        slot = np.take_along_axis(slots.reshape(wanted.shape), page[:, None] + np.zeros((1, most, 1), np.int64), axis=2)
        values, scale, zero = _index_rows(read, slot, np.broadcast_to(line[:, None], slot.shape), self.store)
        q = part.gather(2, torch.from_numpy(chosen)[:, None].expand(-1, part.shape[1], -1))  # (N, g, r)
        weights = torch.einsum("ngr,nbr->nbgr", q, scale)
        sums = weights @ values + torch.einsum("ngr,nbr->nbg", q, zero)[..., None]  # (N, blocks, g, T)
        held = torch.from_numpy(np.arange(most) < blocks[:, None])[..., None, None]
        scores[..., : most * scan.block_tokens] = sums.masked_fill(~held, 0).transpose(1, 2).flatten(2)

    def _score_tail(self, rows: StoredRows, part: Tensor, scan: Scan, scores: Tensor) -> None:
        """Scores of the tokens behind the last whole block, from their token groups."""
        each = self.store.layout.group_tokens
        first = rows.tokens // scan.block_tokens * scan.block_tokens // each
        groups = np.arange(-(-int(rows.tokens.max()) // each))
        wanted = (groups >= first[:, None]) & (groups * each < rows.tokens[:, None])
        got = rows.groups(self.store, wanted, self._read, values=False)
        if not got.number.size:
            return
        number = np.where(got.number < 0, len(groups), got.number)
        place = torch.from_numpy(number)[..., None] * each + torch.arange(each)
        sums = part @ torch.from_numpy(got.k).flatten(1, 2).float().transpose(1, 2)
        scores.scatter_(2, place.flatten(1)[:, None].expand_as(sums), sums)

    def _read(self, kind: PageKind, pages: Ints, keys: PageKeys) -> PageData:
        self._counters.count(kind.name.lower(), len(pages) * self.store.layout.page_bytes)
        return self.store.read(pages, keys)


def _index_rows(read: PageData, slot: Ints, line: Ints, store: KvStore) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (…, T), scale (…) and zero (…) of rows: `line` of page `slot` of what was read; -1: any."""
    layout = store.pages.index_layout
    slot = np.maximum(slot, 0)
    data = read.data[:, : layout.rows * layout.stride_bytes].reshape(-1, layout.rows, layout.stride_bytes)
    size = layout.block_tokens * layout.format.bits // 8
    codes = torch.from_numpy(data[slot, line, :size])
    if layout.format is IndexFormat.FP16:
        values = codes.view(torch.float16).float()
        return values, torch.ones(slot.shape), torch.zeros(slot.shape)
    if layout.format is IndexFormat.INT4:
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    factors = np.ascontiguousarray(read.aux[slot, line * layout.row_codewords, :4]).view(np.float16).astype(np.float32)
    return codes.float(), torch.from_numpy(factors[..., 0]), torch.from_numpy(factors[..., 1])
