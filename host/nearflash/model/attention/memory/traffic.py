"""Traffic of one head: page requests, codewords asked for, bytes used.

A request reads the codewords that hold something wanted, whole: of an index page the rows of the chosen dims;
of a KV page group K of the unindexed suffix (TAIL), K and V of the chosen tokens (GATHER).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.codeword import CODEWORD_BYTES
from nearflash.abi.attention.pages import TokenLayout
from nearflash.model.attention.memory.settings import HeadSettings

__all__ = ["HeadReads", "HeadTraffic", "group_codewords", "traffic"]

Bools = NDArray[np.bool_]
_FP16_BYTES = 2


@dataclass(frozen=True)
class HeadReads:
    """Requests of one kind."""

    requests: int
    codewords: int
    """Codewords asked for."""
    used_bytes: int
    """Data bytes that were wanted."""

    @property
    def requested_bytes(self) -> int:
        """Data bytes of the codewords asked for."""
        return self.codewords * CODEWORD_BYTES


@dataclass(frozen=True)
class HeadTraffic:
    """Reads of one head, by phase."""

    index: HeadReads
    suffix: HeadReads
    gather: HeadReads

    @property
    def all(self) -> HeadReads:
        """Sum of the phases."""
        parts = (self.index, self.suffix, self.gather)
        return HeadReads(*(sum(getattr(p, name) for p in parts) for name in ("requests", "codewords", "used_bytes")))


def traffic(settings: HeadSettings, dims: NDArray[np.int64], chosen: NDArray[np.bool_]) -> HeadTraffic:
    """Reads of a head with the scan's `dims` (r,), none for dense attention, and the `chosen` tokens (S,)."""
    tokens, covered = len(chosen), settings.count_scanned(len(chosen))
    scan = len(dims) > 0
    suffix = np.zeros(tokens, bool)
    suffix[covered:] = scan
    return HeadTraffic(
        _index(settings, dims, covered),
        _groups(settings, suffix, values=(False,)),
        _groups(settings, chosen, values=(False, True)),
    )


def _index(settings: HeadSettings, dims: NDArray[np.int64], covered: int) -> HeadReads:
    blocks = covered // settings.block_tokens
    if not blocks:
        return HeadReads(0, 0, 0)
    layout = settings.index_layout
    rows = blocks * len(dims)
    pages = blocks * len(np.unique(dims // layout.rows))
    return HeadReads(pages, rows * layout.row_codewords, rows * settings.block_tokens * layout.format.bits // 8)


def _groups(settings: HeadSettings, wanted: NDArray[np.bool_], values: tuple[bool, ...]) -> HeadReads:
    """KV page groups with some token wanted (S,); of each wanted token K (False) and V (True) as `values` states."""
    layout = settings.token_layout
    groups = np.zeros((-(-len(wanted) // layout.tokens), layout.tokens), bool)
    groups.reshape(-1)[: len(wanted)] = wanted
    used = int(groups.sum()) * len(values) * settings.dim * _FP16_BYTES
    return HeadReads(int(groups.any(axis=1).sum()), int(group_codewords(layout, groups, values).sum()), used)


def group_codewords(layout: TokenLayout, wanted: Bools, values: tuple[bool, ...]) -> Bools:
    """Codewords asked for (groups, codewords of K's and V's page), of groups with tokens `wanted` (groups, n)."""
    holds = np.zeros((layout.tokens, layout.pages * layout.page_codewords), bool)
    for token in range(layout.tokens):
        for value in values:
            start, end = layout.span(token, value=value)
            holds[token, start // CODEWORD_BYTES : -(-end // CODEWORD_BYTES)] = True
    return wanted.astype(np.float32) @ holds.astype(np.float32) > 0
