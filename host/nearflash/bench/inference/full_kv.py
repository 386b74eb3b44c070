"""Attention that reads all K and V from disk in every step: what offloading without near-storage attention does.

    layer l: K and V of all sequences, one after the other ──► attention     (as FlexGen keeps them)
    layer l + 1: read meanwhile, in pieces of 8 MiB by several threads

Tokens that are appended stay in memory, after those on disk: their writes are not charged to it.
Source: FlexGen (arXiv 2303.06865), section 3.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearflash.abi.errors import StateError, UnsupportedError
from nearflash.inference.engines.base import Engine, EngineCounters
from nearflash.storage.io.backend import BLOCK_BYTES
from nearflash.storage.io.direct import DirectFile, aligned_buffer
from nearflash.storage.kv import KvShape

__all__ = ["FullKvEngine"]

F16 = NDArray[np.float16]
_PIECE_BYTES = 8 << 20
_THREADS = 4
_TOKENS_AT_ONCE = 4096
"""Converted to fp32 while they are in the processor's cache."""


class FullKvEngine(Engine):
    """Sequences of `tokens` tokens each on disk; `sequences` of them.

    The first append of a sequence to a layer goes to disk and must bring all `tokens`; later ones stay in memory. Of
    the layers as many as fit `cache_bytes` are in memory, too, and are not read; they are spread among the others.
    `repeat`: K and V of a KV head lie on disk so many times, each for a part of its query heads. Without `ahead` a
    layer is read when it is wanted.
    """

    name = "full-kv"

    def __init__(
        self, path: Path, shape: KvShape, *, sequences: int, tokens: int, cache_bytes: int = 0, repeat: int = 1,
        ahead: bool = True,
    ) -> None:  # fmt: skip
        self.kv_heads, self._repeat, self._reads_ahead = shape.kv_heads, repeat, ahead
        self._kv_shape = (sequences, 2, shape.kv_heads * repeat, tokens, shape.dim)
        self._layer_bytes = -(-2 * int(np.prod(self._kv_shape)) // BLOCK_BYTES) * BLOCK_BYTES
        self._file = DirectFile.create(path, self._layer_bytes * shape.layers)
        self._buffers = [aligned_buffer(self._layer_bytes) for _ in range(2)]
        count_kept = min(cache_bytes // self._layer_bytes, shape.layers - 1)
        spread = {number * shape.layers // count_kept for number in range(count_kept)}
        self._kept = {layer: aligned_buffer(self._layer_bytes) for layer in spread}
        on_disk = [layer for layer in range(shape.layers) if layer not in spread]
        self._next = dict(zip(on_disk, on_disk[1:] + on_disk[:1], strict=True))
        """The layer that is read after each one."""
        self._pool = ThreadPoolExecutor(_THREADS, "full-kv")
        self._ahead: tuple[int, list[Future[None]]] | None = None
        self._later: dict[tuple[int, int], list[tuple[F16, F16]]] = {}
        self._filling = aligned_buffer(self._layer_bytes)
        self._numbers = count()
        self._counters = EngineCounters()

    @property
    def cache_bytes(self) -> int:
        """Memory for K and V."""
        return (2 + len(self._kept)) * self._layer_bytes

    def add(self) -> int:
        """See Engine.add."""
        return next(self._numbers)

    def free(self, sequence: int) -> None:
        """Forget what is in memory."""
        self._later = {key: kv for key, kv in self._later.items() if key[0] != sequence}

    def append(self, sequence: int, layer: int, k: F16, v: F16) -> None:
        """See Engine.append; sequences of a layer come in their order. Raises StateError for other lengths at first."""
        k, v = (np.repeat(x, self._repeat, axis=0) for x in (k, v))
        if (sequence, layer) in self._later:
            self._later[sequence, layer].append((k, v))
            return
        if k.shape != self._kv_shape[2:]:
            raise StateError(f"the first tokens of a sequence must have the shape {self._kv_shape[2:]}, not {k.shape}")
        self._view(self._filling)[sequence] = np.stack([k, v])
        self._later[sequence, layer] = []
        if sequence == self._kv_shape[0] - 1:
            self._file.write(layer * self._layer_bytes, self._filling)
            if layer in self._kept:
                self._kept[layer][:] = self._filling

    def attend(
        self, layer: int, sequences: Sequence[int], q: F16, scaling: float | None = None, *,
        softcap: float | None = None, sinks: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:  # fmt: skip
        """See Engine.attend. Of one token at a time, without softcap and sinks: UnsupportedError."""
        if q.ndim != 4 or softcap is not None or sinks is not None:
            raise UnsupportedError("attention of the bench must be of one token, without softcap and sinks")
        scaling = q.shape[-1] ** -0.5 if scaling is None else scaling
        read = self._kept[layer] if layer in self._kept else self._read(layer)
        with self._counters.time_phase("attend"), torch.no_grad():
            kv = torch.from_numpy(self._view(read))
            heads = range(self._kv_shape[2])
            outs = [
                _attend_head(torch.from_numpy(query[head]).float() * scaling, kv[sequence, :, head], last)
                for sequence, query in zip(sequences, q.reshape(len(q), len(heads), -1, q.shape[-1]), strict=True)
                for head, last in zip(heads, self._last(sequence, layer), strict=True)
            ]
            self._counters.heads += len(outs)
            return torch.stack(outs).reshape(q.shape).numpy()

    @property
    def counters(self) -> EngineCounters:
        """See Engine.counters."""
        return self._counters

    def close(self) -> None:
        """See Engine.close."""
        self._pool.shutdown()
        self._file.close()

    def _read(self, layer: int) -> NDArray[np.uint8]:
        """A layer from disk; the next one that is not in memory is on its way then."""
        with self._counters.time_phase("read"):
            if self._ahead is None or self._ahead[0] != layer:
                self._begin(layer)
            assert self._ahead is not None
            for piece in self._ahead[1]:
                piece.result()
            read = self._buffers[0]
            self._buffers.reverse()
            self._ahead = None
            if self._reads_ahead:
                self._begin(self._next[layer])
            return read

    def _begin(self, layer: int) -> None:
        """Read a layer into the first buffer."""
        buffer, start = self._buffers[0], layer * self._layer_bytes
        places = range(0, self._layer_bytes, _PIECE_BYTES)
        pieces = [self._pool.submit(self._file.read, start + at, buffer[at : at + _PIECE_BYTES]) for at in places]
        self._counters.count("token", self._layer_bytes)
        self._ahead = layer, pieces

    def _view(self, buffer: NDArray[np.uint8]) -> F16:
        """(sequences, K and V, heads, tokens, d)."""
        size = 2 * int(np.prod(self._kv_shape))
        return buffer[:size].view(np.float16).reshape(self._kv_shape)

    def _last(self, sequence: int, layer: int) -> Tensor:
        """K and V (heads, 2, t, d) of the tokens in memory."""
        later = self._later[sequence, layer]
        return torch.from_numpy(np.stack([np.concatenate([kv[i] for kv in later], axis=1) for i in range(2)], axis=1))


def _attend_head(q: Tensor, kv: Tensor, last: Tensor) -> Tensor:
    """Softmax attention of scaled q (g, d) to kv and last (2, t, d)."""
    k, v = ([*part.split(_TOKENS_AT_ONCE), end] for part, end in zip(kv, last, strict=True))
    weights = torch.cat([q @ x.float().T for x in k], dim=1).softmax(dim=1).split([len(x) for x in k], dim=1)
    out = torch.zeros_like(q)
    for weight, x in zip(weights, v, strict=True):
        out += weight @ x.float()
    return out
