"""KVSwap's choice of tokens, to compare with: the rule of nearflash.inference.sparse.kvswap as its authors set it.

r, G and the mean over heads are those of the authors' published settings: H·d / r = 8, G = 4 for NVMe drives. Tokens
behind the last whole group are in memory (the rolling buffer), as the index is. Not modelled: the reuse buffer, which
keeps groups of the last steps in memory, so that bytes of flash are those without it; A is found on the texts that the
caller has, the authors' is found on 20 of C4.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from nearflash.bench.inference.settings import Setting
from nearflash.inference.cache.decoder import flash_layers
from nearflash.inference.calibration.window import FlashUse, HeadWindow
from nearflash.inference.sparse.attention import attend_chosen
from nearflash.inference.sparse.kvswap import (
    choose_groups,
    find_projection,
    reduce_queries,
    score_groups,
    token_rows,
)

__all__ = ["GROUP_TOKENS", "find_projections", "kvswap", "select_groups"]

GROUP_TOKENS = 4
_COMPRESSION = 8


@torch.no_grad()
def find_projections(model: Any, texts: Iterable[Tensor], rank: int | None = None) -> dict[int, Tensor]:
    """A (H·d, r) of each layer on flash, by its place among these; texts: token ids. rank: None: H·d / 8."""
    grams: dict[int, Tensor] = {}
    for ids in texts:
        cache = DynamicCache(config=model.config)
        model(ids[None], past_key_values=cache, logits_to_keep=1)
        for place, number in enumerate(flash_layers(model.config)):
            rows = token_rows(cache.layers[number].keys[0]).double()
            grams[place] = grams.get(place, 0) + rows.T @ rows
    ranks = {place: rank or max(len(gram) // _COMPRESSION, 1) for place, gram in grams.items()}
    return {place: find_projection(gram, ranks[place]) for place, gram in grams.items()}


def select_groups(given: HeadWindow, projection: Tensor, count: Tensor) -> Tensor:
    """Tokens (P, S) of the groups with the largest scores, `count` (P,) tokens at most, and of no whole group yet.

    The token of a position itself is of none. In the first layer all tokens.
    """
    assert given.keys is not None
    position, seen = torch.arange(given.k.shape[1]), given.tokens.unsqueeze(-1)
    if given.predicted is None:
        return position < seen
    groups = (given.tokens - 1) // GROUP_TOKENS
    reduced = reduce_queries(given.predicted, projection, len(given.keys))
    scores = score_groups(reduced, token_rows(given.keys) @ projection, GROUP_TOKENS)
    chosen = choose_groups(scores, groups, count // GROUP_TOKENS).repeat_interleave(GROUP_TOKENS, dim=-1)
    return chosen[:, : len(position)] | ((position >= groups.unsqueeze(-1) * GROUP_TOKENS) & (position < seen))


def kvswap(projections: Mapping[int, Tensor], top_k: float) -> Setting:
    """The setting that reads this share of the tokens, by the projections of `find_projections`."""

    def attend(given: HeadWindow) -> tuple[Tensor, FlashUse]:
        projection = projections[given.layer]
        chosen = select_groups(given, projection, (given.tokens * top_k).round().long())
        out = attend_chosen(given.q, given.k, given.v, chosen[None], given.scaling)
        return out, _count_use(given, chosen, projection)

    keys = {"top_k": top_k, "rank": next(iter(projections.values())).shape[1], "group_tokens": GROUP_TOKENS}
    return Setting("kvswap", keys, attend, GROUP_TOKENS, predicts=True)


def _count_use(given: HeadWindow, chosen: Tensor, projection: Tensor) -> FlashUse:
    """A KV head's bytes: chosen groups from the drive; in memory the tokens behind them, and its part of the index,
    which the first layer does not read.
    """
    grouped = (given.tokens - 1) // GROUP_TOKENS * GROUP_TOKENS
    on_flash = (chosen & (torch.arange(chosen.shape[1]) < grouped.unsqueeze(-1))).sum(dim=-1) / given.tokens
    behind = (given.tokens - grouped) / given.tokens
    index = projection.shape[1] / (2 * projection.shape[0]) * grouped / given.tokens
    if given.predicted is None:
        index = torch.zeros(())
    return FlashUse(gather=float(on_flash.mean()), memory=float((behind + index).mean()))
