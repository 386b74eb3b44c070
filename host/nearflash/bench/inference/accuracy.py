"""Bench `accuracy`: loss against the flash bytes that attention reads.

Teacher-forced loss of the last 256 tokens of texts, attention at those positions replaced, that of the prefix dense.
`delta_nll_percent` is the loss of all texts over that of dense attention, less one (texts have as many tokens each, so
this is a mean over tokens); `delta_nll_percent_error` its standard error over texts (delete-one jackknife);
`delta_nll_percent_of_texts` the mean of the texts' own ratios. Give texts that the settings were not found on.

`flash_fraction` is of the bytes of a KV head's K and V (4·d·S): codewords asked of flash, of the index and of chosen
tokens. The unindexed suffix (tokens after the last whole index block) is in memory (KvStore): what is read there is
`memory_fraction`. `flash_fraction_indexed` is of the K and V in whole blocks alone: about what S a multiple of T takes.
`flash_fraction_pages` is that of reading whole pages. A row with a `skipped` key measured nothing.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from torch import Tensor

from nearflash.abi.errors import CommandError
from nearflash.bench.inference import retrieval
from nearflash.bench.inference.kvswap import find_projections, kvswap
from nearflash.bench.inference.losses import loss_delta
from nearflash.bench.inference.recommended import MODES, every_setting, recommend
from nearflash.bench.inference.settings import Setting
from nearflash.bench.inference.texts import extend_positions, manual_pieces
from nearflash.bench.inference.together import measure_together
from nearflash.bench.options import Option, check_choices
from nearflash.inference.cache.decoder import kv_shape_of
from nearflash.inference.calibration.choose import AUTO, choose_policy
from nearflash.inference.calibration.texts import beginnings
from nearflash.inference.calibration.window import NAME, FlashUse, Prefix
from nearflash.inference.models import load_model
from nearflash.weights.pretrained import SMOLLM2

__all__ = ["measure", "run"]

_WINDOW = 256
_PIECES = 4
"""Of the manual."""
PARTS = POLICY, SWEEP, RETRIEVAL, TOGETHER, KVSWAP = "policy", "sweep", "retrieval", "together", "kvswap"
_CALIBRATION = (16, 512)
"""Windows, and tokens of each, that prune for `together`."""
_COUNTED = 16
"""Positions of which one's bytes are counted in `together`."""
_PROJECTED, _KVSWAP_BUDGETS = 8, (0.1, 0.2, 0.4)
"""Pieces of the manual that KVSwap's projection is found on, and shares of the tokens that it reads."""


def run(
    parts: Annotated[Collection[str], Option("Measure these parts.", many=True, choices=PARTS)] = (POLICY, RETRIEVAL),
    model: Annotated[str, Option("The model of this folder, or smollm2.", metavar="DIR")] = SMOLLM2,
    policy: Annotated[str, Option("A policy file, or auto.", metavar="FILE")] = AUTO,
    mode: Annotated[
        str | None, Option("Measure the recommended setting of this mode in place of the policy.", metavar="MODE")
    ] = None,
    texts: Annotated[
        Sequence[Path],
        Option("UTF-8 files of as many tokens or more (default: the manual's).", Path, many=True, metavar="FILE"),
    ] = (),
    tokens: Annotated[Sequence[int], Option("Tokens of each text.", int, many=True, metavar="N")] = (4096,),
) -> Iterator[dict[str, Any]]:
    """Rows of parts: `policy`, one setting at each length of texts; `sweep`, many, of published methods, too;
    `retrieval`, each mode at the look-up task; `together`, dense attention and that setting, weights and KV cache of
    16 and 4 bits, pruned and not; `kvswap`, KVSwap's choice at several budgets. What is pruned and what projects are
    found on pieces of the manual other than those that are measured.

    Where a text has more tokens than the model has positions, these are scaled (YaRN), and the row has how: `rope`.
    Raises CommandError for other modes, for parts that are none, and for files that cannot be used.
    """
    if mode is not None and mode not in MODES:
        raise CommandError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
    check_choices("parts", parts, PARTS)
    if any(count <= _WINDOW for count in tokens):
        raise CommandError(f"tokens must be more than {_WINDOW}, those that are measured, not {min(tokens)}")
    try:
        loaded, tokenizer = load_model(model)
    except CommandError as missing:
        yield {"model": model, "skipped": str(missing)}
        return
    loaded.set_attn_implementation(NAME)
    if RETRIEVAL in parts:
        yield from retrieval.measure(model, loaded, tokenizer, mode)
    settings = [recommend(loaded.config, mode or "sparf-page", policy)] if POLICY in parts else []
    settings += every_setting(loaded.config) if SWEEP in parts else []
    _, _, sentence = choose_policy(loaded.config, kv_shape_of(loaded.config), 1 << 20, policy)
    for count in sorted(tokens) if settings or {TOGETHER, KVSWAP} & {*parts} else ():
        rope = extend_positions(loaded, count)
        given = [*(beginnings(tokenizer, texts, count) if texts else manual_pieces(tokenizer, _PIECES, count))]
        for row in measure(model, loaded, settings, given):
            yield row | {"policy": sentence, "rope": rope}
        if KVSWAP in parts:
            others = manual_pieces(tokenizer, _PIECES + _PROJECTED, count)[_PIECES:]
            projections = find_projections(loaded, others)
            by_budget = [kvswap(projections, top_k) for top_k in _KVSWAP_BUDGETS]
            for row in measure(model, loaded, by_budget, given):
                yield row | {"rope": rope}
        if TOGETHER in parts:
            number, length = _CALIBRATION
            others = manual_pieces(tokenizer, _PIECES * count // length + number, length)[-number:]
            both = [recommend(loaded.config, each, policy, _COUNTED) for each in ("dense", mode or "sparf-page")]
            for row in measure_together(model, loaded, both, given, others, _WINDOW):
                yield row | {"policy": sentence, "rope": rope}


@dataclass
class _Losses:
    """One setting on every text."""

    losses: list[float] = field(default_factory=list)
    uses: list[FlashUse] = field(default_factory=list)


def measure(
    name: str, model: Any, settings: Sequence[Setting], texts: Iterable[Tensor], window: int = _WINDOW
) -> Iterator[dict[str, Any]]:
    """A row for each setting, of the last `window` tokens of texts (token ids, as many each).

    The model's attention is one that can be replaced.
    """
    attend_dense, every = recommend(model.config, "dense"), any(setting.history for setting in settings)
    dense = _Losses()
    losses_by_setting = [_Losses() for _ in settings]
    seen = range(0)
    for ids in texts:
        prefix = Prefix(model, ids[:-window], history=every)
        seen = range(len(ids) - window + 1, len(ids) + 1)
        for losses, setting in zip([dense, *losses_by_setting], [attend_dense, *settings], strict=True):
            loss, use = prefix.loss(ids[-window:], setting.attend, predicts=setting.predicts)
            losses.losses.append(loss)
            losses.uses.append(use)
    for setting, losses in zip(settings, losses_by_setting, strict=True):
        yield _row(name, setting, losses, dense, seen)


def _row(name: str, setting: Setting, measured: _Losses, dense: _Losses, seen: range) -> dict[str, Any]:
    use = FlashUse.mean(measured.uses)
    losses, exact = np.array(measured.losses), np.array(dense.losses)
    delta, error = loss_delta(losses, exact)
    block = setting.block_tokens
    indexed = sum(tokens // block * block / tokens for tokens in seen) / len(seen)
    return {
        "model": name,
        "mode": setting.mode,
        **setting.keys,
        "flash_fraction": use.all,
        "memory_fraction": use.memory,
        "flash_fraction_indexed": use.all / indexed if indexed else 0.0,
        "flash_fraction_pages": use.pages or use.all,
        "index_fraction": use.index,
        "gather_fraction": use.gather,
        "delta_nll_percent": delta,
        "delta_nll_percent_error": error,
        "delta_nll_percent_of_texts": float(100 * (losses / exact - 1).mean()),
        "nll": float(losses.mean()),
        "nll_dense": float(exact.mean()),
        "texts": len(losses),
        "tokens": seen.stop - 1,
        "positions": len(seen),
        "unit": "of 4·d·S bytes a KV head",
    }
