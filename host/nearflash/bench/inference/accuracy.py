"""Bench `accuracy`: loss against the flash bytes that attention reads.

Teacher-forced loss of the last 256 of 4,096 tokens, attention at those positions replaced, that of the prefix dense.
`delta_nll_percent` is the loss of all texts over that of dense attention, less one (texts have as many tokens each, so
this is a mean over tokens); `delta_nll_percent_error` its standard error over texts (delete-one jackknife);
`delta_nll_percent_of_texts` the mean of the texts' own ratios. Settings were found on texts with even numbers, and on
other files; these are odd ones.

`flash_fraction` is of the bytes of a KV head's K and V (4·d·S): codewords asked of flash, of the index and of chosen
tokens. The unindexed suffix (tokens after the last whole index block) is in memory (KvStore): what is read there is
`memory_fraction`. `flash_fraction_indexed` is of the K and V in whole blocks alone: about what S a multiple of T takes.
`flash_fraction_pages` is that of reading whole pages. A row with a `skipped` key measured nothing.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from torch import Tensor

from nearflash.abi.errors import CommandError
from nearflash.bench.inference import retrieval
from nearflash.bench.inference.recommended import MODES, recommended, sweep
from nearflash.bench.inference.settings import Setting
from nearflash.bench.inference.subjects import (
    DOCLM,
    MODELS_VARIABLE,
    SUBJECTS,
    TOKENS,
    held_out,
    model_folder,
    subject,
)  # fmt: skip
from nearflash.bench.options import Option
from nearflash.inference.cache.decoder import kv_shape_of
from nearflash.inference.models import load_model
from nearflash.inference.policy.choose import AUTO, choose_policy
from nearflash.inference.policy.policy import AttentionMode
from nearflash.inference.policy.texts import token_ids
from nearflash.inference.policy.window import NAME, FlashUse, Prefix

__all__ = ["measure", "run"]

_WINDOW = 256
_REPORTED = {
    "SmolLM2-135M-Instruct": (1, 17, 9, 27, 5, 31, 13, 29),
    "doclm-30m": (1, 33, 17, 55, 9, 25, 63, 57, 5, 13, 21, 29, 3, 7, 19, 59),
}
"""Numbers of the texts. Rows 38 to 51 are left out: they say one sentence of many instructions, next to no loss."""
_SWEPT = 4
"""Texts of a sweep."""


def run(
    parts: Annotated[
        Collection[str] | None,
        Option("Measure these models or parts (default: all).", many=True, choices=(*SUBJECTS, "retrieval")),
    ] = None,
    mode: Annotated[
        str | None,
        Option(
            "Measure the recommended setting of this mode, on all texts, in place of a sweep on some.", metavar="MODE"
        ),
    ] = None,
    texts: Annotated[
        Sequence[Path],
        Option("Measure on these UTF-8 files too, of 4,096 tokens or more.", Path, many=True, metavar="FILE"),
    ] = (),
    model: Annotated[
        str | None,
        Option("Measure this model alone, a folder or smollm2, on the files of --texts.", metavar="DIR"),
    ] = None,
    policy: Annotated[str, Option("With --model: a policy file, or auto.", metavar="FILE")] = AUTO,
    tokens: Annotated[int, Option("With --model: tokens of each text.", int, metavar="N")] = TOKENS,
) -> Iterator[dict[str, Any]]:
    """Rows of `parts`: models' names and `retrieval` (default: all); for SmolLM2 the files `texts`, too.

    With `mode` only the recommended setting of that mode, on all texts, else all of the sweep, on some. With `model`
    the setting of `policy`, or of `mode`, on the first `tokens` tokens of the files `texts`. Raises
    CommandError for other names, and for files that cannot be used.
    """
    if mode is not None and mode not in MODES:
        raise CommandError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
    if model is not None:
        yield from _own(model, policy, mode, texts, tokens)
        return
    known = {*SUBJECTS, "retrieval"}
    if parts is not None and not set(parts) <= known:
        raise CommandError(f"parts must be of {', '.join(sorted(known))}, not {', '.join(parts)}")
    folder = model_folder()
    for name in SUBJECTS:
        if parts is not None and name not in parts:
            continue
        files = () if name == DOCLM else texts
        if folder is None and not files:
            yield {"model": name, "mode": mode, "skipped": f"set {MODELS_VARIABLE} to the folder with its texts"}
            continue
        loaded, tokenizer = subject(name, folder)
        settings = sweep(loaded.config) if mode is None else [recommended(loaded.config, mode)]
        numbers = _REPORTED[name][: _SWEPT if mode is None else None]
        own = held_out(name, tokenizer, folder, list(numbers)) if folder else ()
        yield from measure(name, loaded, settings, chain(own, token_ids(tokenizer, files, TOKENS)))
    if parts is None or "retrieval" in parts:
        yield from retrieval.measure(mode)


def _own(name: str, policy: str, mode: str | None, texts: Sequence[Path], tokens: int) -> Iterator[dict[str, Any]]:
    """Rows of a model of the user's."""
    if not texts:
        raise CommandError("texts must be given with model: UTF-8 files as it will read them")
    if tokens <= _WINDOW:
        raise CommandError(f"tokens must be more than {_WINDOW}, those that are measured, not {tokens}")
    loaded, tokenizer = load_model(name)
    setting = recommended(loaded.config, mode or AttentionMode.SPARF_PAGE, policy)
    _, _, sentence = choose_policy(loaded.config, kv_shape_of(loaded.config), 1 << 20, policy)
    loaded.set_attn_implementation(NAME)
    for row in measure(name, loaded, [setting], token_ids(tokenizer, texts, tokens)):
        yield row | {"policy": sentence}


@dataclass
class _Losses:
    """One setting on every text."""

    losses: list[float] = field(default_factory=list)
    uses: list[FlashUse] = field(default_factory=list)


def measure(
    name: str, model: Any, settings: Sequence[Setting], texts: Iterable[Tensor], window: int = _WINDOW
) -> Iterator[dict[str, Any]]:
    """A row for each setting, of the last `window` tokens of texts (token ids, as many each); `model` of `subject`."""
    attend_dense, every = recommended(model.config, AttentionMode.DENSE), any(setting.history for setting in settings)
    dense = _Losses()
    found = [_Losses() for _ in settings]
    seen = range(0)
    for ids in texts:
        prefix = Prefix(model, ids[:-window], history=every)
        seen = range(len(ids) - window + 1, len(ids) + 1)
        for losses, setting in zip([dense, *found], [attend_dense, *settings], strict=True):
            loss, use = prefix.loss(ids[-window:], setting.attend)
            losses.losses.append(loss)
            losses.uses.append(use)
    for setting, losses in zip(settings, found, strict=True):
        yield _row(name, setting, losses, dense, seen)


def _row(name: str, setting: Setting, measured: _Losses, dense: _Losses, seen: range) -> dict[str, Any]:
    use = FlashUse.mean(measured.uses)
    losses, exact = np.array(measured.losses), np.array(dense.losses)
    delta, error = _delta(losses, exact)
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


def _delta(losses: np.ndarray, dense: np.ndarray) -> tuple[float, float | None]:
    """Percent by which the losses are above dense, and the jackknife's standard error; None for one text."""
    count = len(losses)
    delta = float(100 * (losses.sum() / dense.sum() - 1))
    if count == 1:
        return delta, None
    without = 100 * ((losses.sum() - losses) / (dense.sum() - dense) - 1)
    return delta, float(np.sqrt((count - 1) / count * ((without - without.mean()) ** 2).sum()))
