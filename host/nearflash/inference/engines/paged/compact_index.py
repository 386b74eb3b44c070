"""KVSwap's index in memory: of each token of whole index blocks one row of all heads of a layer, in few values.

Rows are K of all heads times A, in fp16. A is made of the K of the sequence's first whole block, where the authors' is
made of other texts: nothing is kept beside the model. Rule and source: nearflash.inference.sparse.kvswap.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearflash.inference.sparse.kvswap import find_projection, token_rows
from nearflash.storage.kv import KvShape

__all__ = ["CompactIndex", "CompactRows", "compact_bytes"]

ReadKeys = Callable[[range], NDArray[np.float16]]
"""K (H, t, d) of whole blocks."""


@dataclass(frozen=True)
class CompactRows:
    """Rows of a (sequence, layer)."""

    projection: Tensor
    """A, (H·d, r) fp32."""
    rows: Tensor
    """(S, r) fp16, S a multiple of the block's tokens."""

    @property
    def size_bytes(self) -> int:
        """Memory that they take."""
        return self.projection.nbytes + self.rows.nbytes


def compact_bytes(shape: KvShape, rank: int, tokens: int) -> int:
    """Memory of the rows and A of so many tokens, all layers."""
    return shape.layers * rank * (2 * tokens + 4 * shape.kv_heads * shape.dim)


class CompactIndex:
    """Rows by (sequence, layer), of blocks of `block_tokens`; what lacks is made of K that `ReadKeys` reads.

    Threads may ask at once, each for other sequences.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._kept: dict[tuple[int, int], CompactRows] = {}

    @property
    def size_bytes(self) -> int:
        """Memory that all rows take."""
        return sum(kept.size_bytes for kept in list(self._kept.values()))

    def rows(self, sequence: int, layer: int, blocks: int, rank: int, read: ReadKeys) -> CompactRows:
        """The rows of the first `blocks` blocks, one at least."""
        kept = self._kept.get((sequence, layer)) or self._begin(rank, read)
        have = len(kept.rows) // self._block_tokens
        if have < blocks:
            new = _rows(read(range(have, blocks)), kept.projection)
            kept = CompactRows(kept.projection, torch.cat([kept.rows, new]))
        self._kept[sequence, layer] = kept
        return kept

    def share(self, sequence: int, other: int) -> None:
        """Another sequence has the same blocks."""
        for (number, layer), kept in list(self._kept.items()):
            if number == sequence:
                self._kept[other, layer] = kept

    def truncate(self, sequence: int, blocks: int) -> None:
        """Keep a sequence's first blocks alone; A of none is none."""
        for (number, layer), kept in list(self._kept.items()):
            if number == sequence and blocks * self._block_tokens < len(kept.rows):
                del self._kept[number, layer]
                if blocks:
                    rows = kept.rows[: blocks * self._block_tokens].clone()
                    self._kept[number, layer] = CompactRows(kept.projection, rows)

    def drop(self, sequence: int) -> None:
        """Forget a sequence."""
        self.truncate(sequence, 0)

    def _begin(self, rank: int, read: ReadKeys) -> CompactRows:
        """A and the rows of the first block."""
        keys = read(range(1))
        rows = token_rows(torch.from_numpy(keys)).double()
        projection = find_projection(rows.T @ rows, rank)
        return CompactRows(projection, _rows(keys, projection))


def _rows(keys: NDArray[np.float16], projection: Tensor) -> Tensor:
    return (token_rows(torch.from_numpy(keys)).float() @ projection).half()
