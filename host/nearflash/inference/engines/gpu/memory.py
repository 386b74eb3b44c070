"""Parts of stored sequences that a GPU keeps: index rows, tokens in memory, and KV page groups that were read."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearflash.inference.engines.paged.page_cache import PageCache
from nearflash.inference.engines.paged.reads import SequenceReads
from nearflash.storage.kv import StoredHead

__all__ = ["GpuIndex", "GpuPages", "GpuSuffixes", "upload", "upload_together"]

_STAGED_BYTES = 1 << 16
"""CUDA itself takes so few at once, wherever they lie (CUDA Runtime API, "API synchronization behavior")."""


def upload(array: NDArray, device: torch.device) -> Tensor:
    """An array on the device; on a GPU by way of page-locked memory, behind what its stream does."""
    source = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return source.clone().to(device)
    return (source if source.nbytes <= _STAGED_BYTES else source.pin_memory()).to(device, non_blocking=True)


def upload_together(device: torch.device, *arrays: NDArray[np.int64]) -> list[Tensor]:
    """Arrays of int64 on the device, by one copy."""
    sizes = [array.size for array in arrays]
    parts = upload(np.concatenate([array.reshape(-1) for array in arrays]), device).split(sizes)
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


class GpuPages(PageCache):
    """KV page groups in a device's memory: places as PageCache has them."""

    def __init__(self, limit_bytes: int, group_bytes: int, device: torch.device) -> None:
        super().__init__(limit_bytes, group_bytes)
        places = limit_bytes // group_bytes
        self.tensor = torch.empty((places, group_bytes // 2), dtype=torch.float16, device=device)

    def _room_for(self, places: int) -> NDArray[np.float16]:
        """None on the host."""
        return np.empty((0, self._group_bytes // 2), np.float16)

    def _keep(self, places: list[int], new: NDArray[np.float16]) -> None:
        self.tensor[torch.tensor(places, dtype=torch.int64, device=self.tensor.device)] = upload(
            new, self.tensor.device
        )


class GpuIndex:
    """Index rows of all dims, up to `limit_bytes`, by (sequence, layer): codes (H, B, d, T·bits/8), factors (…, 2)."""

    def __init__(self, limit_bytes: int, device: torch.device) -> None:
        self._limit_bytes, self._device = limit_bytes, device
        self._kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.size_bytes = 0

    def rows(self, reads: SequenceReads, blocks: int) -> tuple[Tensor, Tensor]:
        """Rows of the first blocks of a layer; those that do not fit are read again each time."""
        key = reads.stored.sequence, reads.stored.page_tag.layer
        before = self._kept.get(key)
        have = before[0].shape[1] if before else 0
        if before is not None and have >= blocks:
            return before[0][:, :blocks], before[1][:, :blocks]
        read = reads.blocks(range(have, blocks))
        new = upload(read.codes, self._device), upload(read.factors, self._device)
        rows = new if before is None else (torch.cat([before[0], new[0]], 1), torch.cat([before[1], new[1]], 1))
        if self.size_bytes + read.size_bytes <= self._limit_bytes:
            self._kept[key] = rows
            self.size_bytes += read.size_bytes
        return rows

    def truncate(self, sequence: int, blocks: int) -> None:
        """Keep a sequence's first blocks alone."""
        for key in [key for key in self._kept if key[0] == sequence]:
            codes, factors = self._kept.pop(key)
            self.size_bytes -= codes.nbytes + factors.nbytes
            if blocks:
                codes, factors = codes[:, :blocks].contiguous(), factors[:, :blocks].contiguous()
                self._kept[key] = codes, factors
                self.size_bytes += codes.nbytes + factors.nbytes


@dataclass
class _Suffix:
    kv: Tensor
    first: int
    """The sequence's token that is the first one here."""
    tokens: int


class GpuSuffixes:
    """The tokens that the store has in memory, by (sequence, layer): only those that are new are sent."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[tuple[int, int], _Suffix] = {}

    def of(self, sequences: Sequence[StoredHead]) -> list[Tensor]:
        """K and V (2, H, u, d) of each one's tokens after `flash_tokens`: views of the first u of more."""
        rooms = [self._room(stored) for stored in sequences]
        lacking, new = [], []
        for stored, kept in zip(sequences, rooms, strict=True):
            if (tokens := stored.suffix_k.shape[1]) > kept.tokens:
                lacking.append((kept, tokens))
                new += [suffix[:, kept.tokens :].reshape(-1) for suffix in (stored.suffix_k, stored.suffix_v)]
        if lacking:
            sent = upload(np.concatenate(new), self._device)
            for kept, tokens in lacking:
                target = kept.kv[:, :, kept.tokens : tokens]
                target.copy_(sent[: target.numel()].view(target.shape))
                sent, kept.tokens = sent[target.numel() :], tokens
        return [kept.kv[:, :, : stored.suffix_k.shape[1]] for stored, kept in zip(sequences, rooms, strict=True)]

    def _room(self, stored: StoredHead) -> _Suffix:
        key = stored.sequence, stored.page_tag.layer
        heads, tokens, dim = stored.suffix_k.shape
        kept = self._kept.get(key)
        if kept is None or kept.first != stored.flash_tokens or tokens > kept.kv.shape[2]:
            grown = torch.empty((2, heads, max(2 * tokens, 64), dim), dtype=torch.float16, device=self._device)
            kept = self._kept[key] = _Suffix(grown, stored.flash_tokens, 0)
        return kept

    def drop(self, sequence: int) -> None:
        """Forget a sequence."""
        for key in [key for key in self._kept if key[0] == sequence]:
            del self._kept[key]
