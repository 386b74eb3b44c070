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
from nearflash.bench.inference.recommended import recommended, sweep
from nearflash.bench.inference.settings import Setting
from nearflash.bench.inference.subjects import (
    DOCLM,
    MODELS_VARIABLE,
    SUBJECTS,
    held_out,
    model_folder,
    of_files,
    subject,
)  # fmt: skip
from nearflash.bench.inference.window import FlashUse, Prefix
from nearflash.bench.options import Option
from nearflash.inference.policy.policy import AttentionMode

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
) -> Iterator[dict[str, Any]]:
    """Rows of `parts`: models' names and `retrieval` (default: all); for SmolLM2 the files `texts`, too.

    With `mode` only the recommended setting of that mode, on all texts, else all of the sweep, on some. Raises
    CommandError for other names, and for files that cannot be used.
    """
    known = {*SUBJECTS, "retrieval"}
    if parts is not None and not set(parts) <= known:
        raise CommandError(f"parts must be of {', '.join(sorted(known))}, not {', '.join(parts)}")
    folder = model_folder()
    for name in SUBJECTS:
        if parts is not None and name not in parts:
            continue
        settings = sweep(name) if mode is None else [recommended(name, mode)]
        files = () if name == DOCLM else texts
        if folder is None and not files:
            yield {"model": name, "mode": mode, "skipped": f"set {MODELS_VARIABLE} to the folder with its texts"}
            continue
        model, tokenizer = subject(name, folder)
        numbers = _REPORTED[name][: _SWEPT if mode is None else None]
        own = held_out(name, tokenizer, folder, list(numbers)) if folder else ()
        yield from measure(name, model, settings, chain(own, of_files(tokenizer, files)))
    if parts is None or "retrieval" in parts:
        yield from retrieval.measure(mode)


@dataclass
class _Losses:
    """One setting on every text."""

    losses: list[float] = field(default_factory=list)
    uses: list[FlashUse] = field(default_factory=list)


def measure(
    name: str, model: Any, settings: Sequence[Setting], texts: Iterable[Tensor], window: int = _WINDOW
) -> Iterator[dict[str, Any]]:
    """A row for each setting, of the last `window` tokens of texts (token ids, as many each); `model` of `subject`."""
    attend_dense, every = recommended(name, AttentionMode.DENSE), any(setting.history for setting in settings)
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
