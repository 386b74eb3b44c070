"""Bench `accuracy`, part `together`: weights and KV cache of 4 bits, pruning and sparse attention, alone and together.

As FlexGen (arXiv 2303.06865) compares FP16, 4-bit and 4-bit-S: weights, K and V in groups of 64 codes with a scale and
a minimum; S: what the sparse policy chooses is all that is read. P, pruned weights, is ours. The loss is that of the
last tokens of texts; K and V of all tokens are rounded, the newest one's, too, which the runtime has as they were made.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearflash.bench.inference.losses import loss_delta
from nearflash.bench.inference.settings import Setting
from nearflash.inference.calibration.window import Attend, FlashUse, HeadWindow, Prefix
from nearflash.offload.cache.groups import decode, encode, token_bytes
from nearflash.weights.search import LayerForm, LayerSearch

__all__ = ["SPARSITY", "measure_together", "round_cache"]

SPARSITY = 0.5
"""Of pruned weights; of the sparsities that LayerSearch has."""
_METHOD = "wanda"
_FORMS = {
    (16, 0.0): None,
    (4, 0.0): LayerForm(0.0, "groups", 4),
    (16, SPARSITY): LayerForm(SPARSITY, "bitmap", 16),
    (4, SPARSITY): LayerForm(SPARSITY, "bitmap", 4),
}
_CACHE_BITS = (16, 4)


@dataclass
class _Measured:
    """One combination on every text."""

    losses: list[float] = field(default_factory=list)
    uses: list[FlashUse] = field(default_factory=list)


def measure_together(
    name: str, model: Any, settings: Sequence[Setting], texts: Sequence[Tensor], calibration: Tensor, window: int
) -> Iterator[dict[str, Any]]:
    """A row for each combination, weights by weights; settings: dense attention, then the sparse ones.

    texts: token ids, as many each, of which the last `window` are measured. calibration: other ones, (n, length), by
    which weights are pruned. The model's attention is one that can be replaced; it has its weights again at the end.
    """
    forms = [form for form in _FORMS.values() if form is not None]
    search = LayerSearch(model, _METHOD, torch.float16, forms)
    for _ in search.calibrate(calibration):
        pass
    first: _Measured | None = None
    for (bits, sparsity), form in _FORMS.items():
        with nullcontext(1.0) if form is None else search.fill_layers(form) as fraction:
            measured = _measure(model, settings, texts, window)
        for (cache_bits, number), each in measured.items():
            first = first or each
            yield {
                "model": name, "setting": _name(bits, cache_bits, sparsity, number), "weight_bits": bits,
                "weight_sparsity": sparsity, "cache_bits": cache_bits, "mode": settings[number].mode,
                "weights_fraction": fraction, "window": window, **_row(each, first),
                "tokens": len(texts[0]),
            }  # fmt: skip


def _measure(
    model: Any, settings: Sequence[Setting], texts: Sequence[Tensor], window: int
) -> dict[tuple[int, int], _Measured]:
    """Losses of the model as it is, by bits of K and V and the setting's number."""
    measured = {key: _Measured() for key in product(_CACHE_BITS, range(len(settings)))}
    for ids in texts:
        prefix = Prefix(model, ids[:-window], history=False)
        for (bits, number), each in measured.items():
            loss, use = prefix.loss(ids[-window:], round_cache(settings[number].attend, bits))
            each.losses.append(loss)
            each.uses.append(use)
    return measured


def _row(measured: _Measured, first: _Measured) -> dict[str, Any]:
    use, losses, exact = FlashUse.mean(measured.uses), np.array(measured.losses), np.array(first.losses)
    delta, error = loss_delta(losses, exact)
    return {
        "flash_fraction": use.all, "memory_fraction": use.memory, "nll": float(losses.mean()),
        "perplexity": float(np.exp(losses.mean())), "delta_nll_percent": delta, "delta_nll_percent_error": error,
        "texts": len(losses), "unit": "of 4·d·S bytes a KV head; weights: of the layers' matrices in 16 bits",
    }  # fmt: skip


def _name(bits: int, cache_bits: int, sparsity: float, setting: int) -> str:
    """FlexGen's where weights and cache have as many bits: 4-bit-S; else both: W4-KV16."""
    alike = "FP16" if bits == 16 else "4-bit"
    what = alike if bits == cache_bits else f"W{bits}-KV{cache_bits}"
    return f"{what}{'-P' if sparsity else ''}{'-S' if setting else ''}"


def round_cache(attend: Attend, bits: int) -> Attend:
    """`attend` over K and V as they come back from `bits`, 16 or 4, whose bytes count; those of an index do not."""
    if bits == 16:
        return attend

    def attend_rounded(given: HeadWindow) -> tuple[Tensor, FlashUse]:
        dim = given.k.shape[-1]
        ratio = token_bytes(dim, torch.float16, bits) / token_bytes(dim, torch.float16, 16)
        out, use = attend(replace(given, k=_round(given.k), v=_round(given.v)))
        parts = {part: getattr(use, part) * ratio for part in ("suffix", "gather", "memory", "pages")}
        return out, replace(use, **parts)

    return attend_rounded


def _round(states: Tensor) -> Tensor:
    rounded = torch.empty_like(states)
    decode(encode(states), rounded)
    return rounded
