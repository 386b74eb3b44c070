"""Ways to attend that the bench compares: an attention policy on a page layout, or a baseline, and its keys in a row.

Baselines get one budget, a share of the tokens, and round it to what they choose in: H2O keeps its tokens together and
reads just them, Quest reads its pages and the least and largest K of every page, a local window reads its tokens. What
lies after the last whole block of 1,024 tokens is in memory for them, too.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nearflash.inference.calibration.window import Attend, FlashUse, HeadWindow
from nearflash.inference.policy.policy import AttentionMode, AttentionPolicy
from nearflash.inference.sparse import flash_reads, sparse_attention
from nearflash.inference.sparse.attention import attend_chosen
from nearflash.inference.sparse.baselines import heavy_hitters, local_window, quest_pages
from nearflash.inference.sparse.traffic import dense_bytes
from nearflash.storage.kv import KvLayout

__all__ = ["BASELINES", "Setting", "baseline", "by_policy"]

_SINKS = 4
_PAGE_TOKENS = 16
_BLOCK_TOKENS = 1024


@dataclass(frozen=True)
class Setting:
    """One way to attend."""

    mode: str
    keys: dict[str, Any]
    """Of a row: what it was set to."""
    attend: Attend
    block_tokens: int
    """T: what lies after the last whole block of so many tokens is in memory."""
    history: bool = False
    """Whether `attend` needs that of the prefix."""
    predicts: bool = False
    """Whether it needs queries that the layer before predicts."""


def by_policy(policy: AttentionPolicy, layout: KvLayout, dim: int, counted: int = 1) -> Setting:
    """Attention by a policy, reading pages of `layout` by the codeword, the suffix in memory; `sparq` what it uses.

    counted: bytes are counted at one of so many positions, also the last: counting takes longer than all else.
    """

    def attend(given: HeadWindow) -> tuple[Tensor, FlashUse]:
        head_policy = policy.at(given.layer, given.head)
        done = sparse_attention(given.q, given.k, given.v, given.tokens, head_policy, layout, given.scaling)
        if head_policy.mode is AttentionMode.SPARQ:
            score_dims, chosen = done.score_dims.sum(dim=-1) / (2 * dim), done.chosen.sum(dim=-1) / given.tokens
            return done.out, FlashUse(index=float(score_dims.mean()), gather=float(chosen.mean()))
        at = slice((len(given.tokens) - 1) % counted, None, counted)
        tokens, chosen = given.tokens[at], done.chosen[:, at]
        reads = flash_reads(done.score_dims[:, at], chosen, tokens, layout, suffix_in_memory=True)
        by_codeword = [read.bytes for read in (reads.index, reads.suffix, reads.gather, reads.memory)]
        parts = (*by_codeword, reads.pages * layout.page_bytes)
        return done.out, FlashUse(*(float((part / dense_bytes(tokens, dim)).mean()) for part in parts))

    policies = list(policy.overrides.values()) or [policy]
    score_dims = sum(head.resolve(layout.block_tokens, dim, layout).score_dims for head in policies) / len(policies)
    keys = {
        "score_dims": score_dims, "top_k": policy.top_k, "top_p": policy.top_p, "local_window": policy.local_window,
        "by_probability": policy.by_probability, "index_bits": layout.index_format.bits,
        "group_tokens": layout.group_tokens, "interleaved": layout.interleaved, "block_tokens": layout.block_tokens,
    }  # fmt: skip
    return Setting(str(policy.mode), keys, attend, layout.block_tokens)


def baseline(mode: str, top_k: float) -> Setting:
    """One of BASELINES with a share of the tokens."""
    choice = BASELINES[mode]

    def attend(given: HeadWindow) -> tuple[Tensor, FlashUse]:
        chosen, index = choice(given, (given.tokens * top_k).round().long())
        out = attend_chosen(given.q, given.k, given.v, chosen, given.scaling)
        covered = given.tokens // _BLOCK_TOKENS * _BLOCK_TOKENS
        on_flash = chosen & (torch.arange(chosen.shape[-1]) < covered.unsqueeze(-1))
        flash, every = (float((x.sum(dim=-1) / given.tokens).mean()) for x in (on_flash, chosen))
        share = float((covered / given.tokens).mean())
        return out, FlashUse(index=index * share, gather=flash, memory=every - flash + index * (1 - share))

    return Setting(mode, {"top_k": top_k}, attend, _BLOCK_TOKENS, history=mode == "h2o")


def _local(given: HeadWindow, count: Tensor) -> tuple[Tensor, float]:
    return local_window(given.tokens, given.k.shape[1], count, _SINKS)[None], 0.0


def _h2o(given: HeadWindow, count: Tensor) -> tuple[Tensor, float]:
    assert given.history is not None
    scores = given.q.flatten(1, 2) @ given.k.transpose(1, 2) * given.scaling
    hidden = torch.arange(given.k.shape[1]) >= given.tokens[:, None, None]
    dense = scores.unflatten(1, given.q.shape[1:3]).masked_fill_(hidden, -torch.inf).softmax(dim=-1)
    return heavy_hitters(given.history, dense, given.tokens, count), 0.0


def _quest(given: HeadWindow, count: Tensor) -> tuple[Tensor, float]:
    pages = (count // _PAGE_TOKENS).clamp(min=1)
    return quest_pages(given.q, given.k, given.tokens, pages, _PAGE_TOKENS), 1 / _PAGE_TOKENS


BASELINES = {"quest": _quest, "h2o": _h2o, "local": _local}
"""Tokens (1, P, S) for so many of them (P,), and what choosing them reads, as a share of dense."""
