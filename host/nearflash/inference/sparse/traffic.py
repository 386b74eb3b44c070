"""Flash bytes that a choice of dims and tokens asks for, as the kernel's walkers ask
(docs/contracts/attention.md, 2).

A request reads the codewords of a page that hold something wanted, whole. Of an index page those are the rows of
the chosen dims; of a KV page group K of the unindexed suffix, then K and V of the chosen tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nearflash.abi.attention.codeword import CODEWORD_BYTES
from nearflash.abi.attention.pages import TokenLayout
from nearflash.storage.kv import KvLayout

__all__ = ["FlashReads", "SparseReads", "dense_bytes", "flash_reads"]

_FP16_BYTES = 2


def dense_bytes(tokens: Tensor, dim: int) -> Tensor:
    """Bytes of K and V of S = `tokens`, a KV head."""
    return tokens * 2 * dim * _FP16_BYTES


@dataclass(frozen=True)
class SparseReads:
    """Requests of one kind, int64, by KV head and query position."""

    pages: Tensor
    """Pages touched."""
    codewords: Tensor
    """Codewords asked for."""

    @property
    def bytes(self) -> Tensor:
        """Data bytes of the codewords asked for."""
        return self.codewords * CODEWORD_BYTES


@dataclass(frozen=True)
class FlashReads:
    """Reads of N KV heads at P query positions, (N, P) each."""

    index: SparseReads
    suffix: SparseReads
    """K of the tokens after the last whole index block, for the scan."""
    gather: SparseReads
    memory: SparseReads
    """Of the unindexed suffix, where it is in memory; none of these reads flash."""

    @property
    def bytes(self) -> Tensor:
        """Data bytes of all codewords requested from flash."""
        return self.index.bytes + self.suffix.bytes + self.gather.bytes

    @property
    def pages(self) -> Tensor:
        """All pages of flash touched: what is read where a page can only be read whole."""
        return self.index.pages + self.suffix.pages + self.gather.pages


def flash_reads(
    dims: Tensor, chosen: Tensor, tokens: Tensor, layout: KvLayout, *, suffix_in_memory: bool = False
) -> FlashReads:
    """Reads for `dims` (N, P, d) and `chosen` (N, P, S) bool, tokens (P,) or (N, P); no dim: no scan."""
    dim = dims.shape[-1]
    covered = tokens // layout.block_tokens * layout.block_tokens
    position = torch.arange(chosen.shape[-1], device=chosen.device)
    behind = position >= covered.unsqueeze(-1)
    suffix = behind & (position < tokens.unsqueeze(-1)) & dims.any(dim=-1, keepdim=True)
    groups, index = layout.token_layout(dim), _index(dims, covered, layout)
    scanned, none = _groups(suffix, groups, (False,)), SparseReads(index.pages * 0, index.codewords * 0)
    if not suffix_in_memory:
        return FlashReads(index, scanned, _groups(chosen, groups, (False, True)), none)
    kept = _groups(chosen & behind, groups, (False, True))
    memory = SparseReads(scanned.pages + kept.pages, scanned.codewords + kept.codewords)
    return FlashReads(index, none, _groups(chosen & ~behind, groups, (False, True)), memory)


def _index(dims: Tensor, covered: Tensor, layout: KvLayout) -> SparseReads:
    rows = layout.index_layout(dims.shape[-1])
    blocks = covered // layout.block_tokens
    padded = torch.nn.functional.pad(dims, (0, -dims.shape[-1] % rows.rows))
    pages = padded.unflatten(-1, (-1, rows.rows)).any(dim=-1).sum(dim=-1)
    return SparseReads(blocks * pages, blocks * dims.sum(dim=-1) * rows.row_codewords)


def _groups(wanted: Tensor, layout: TokenLayout, values: tuple[bool, ...]) -> SparseReads:
    """KV page groups with some token wanted (N, P, S); of each wanted token K (False), V (True) as `values` states."""
    holds = torch.zeros(layout.tokens, layout.pages * layout.page_codewords)
    for token in range(layout.tokens):
        for value in values:
            start, end = layout.span(token, value=value)
            holds[token, start // CODEWORD_BYTES : -(-end // CODEWORD_BYTES)] = 1
    padded = torch.nn.functional.pad(wanted, (0, -wanted.shape[-1] % layout.tokens))
    groups = padded.unflatten(-1, (-1, layout.tokens))
    touched = (groups.float() @ holds.to(wanted.device)).clamp_(max=1).sum(dim=(-2, -1)).long()
    pages = groups.any(dim=-1).sum(dim=-1) * (layout.pages if len(values) > 1 else 1)
    return SparseReads(pages, touched)
