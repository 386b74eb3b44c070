"""Bench `accuracy`: loss against the flash bytes that attention reads.

Teacher-forced loss of the last 256 of 4,096 tokens, attention at those positions replaced, that of the prefix dense.
`delta_nll_percent` is the loss of all texts over that of dense attention, less one; `delta_nll_percent_error` its
standard error over texts (jackknife). Settings were found on texts with even numbers; these are odd ones.

`flash_fraction` is of the bytes of a KV head's K and V (4·d·S): codewords asked for, of the index, of the tail (K of
the tokens behind the last whole embedding block, where S was) and of chosen tokens. `flash_fraction_indexed` is that
for S a multiple of the block's tokens, or with the tail in the device's memory; `flash_fraction_pages` that of
reading whole pages. A row with a `skipped` key measured nothing.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nearflash.abi.errors import CommandError
from nearflash.inference.bench import retrieval
from nearflash.inference.bench.recommended import recommended, sweep
from nearflash.inference.bench.settings import Setting
from nearflash.inference.bench.subjects import MODELS_VARIABLE, SUBJECTS, TOKENS, held_out, model_folder, subject
from nearflash.inference.bench.window import FlashUse, Prefix
from nearflash.inference.policy import AttentionMode

__all__ = ["measure", "run"]

_WINDOW = 256
_REPORTED = {"SmolLM2-135M-Instruct": (1, 17, 9, 25, 5, 21, 13, 29), "doclm-30m": (1, 33, 17, 49, 9, 25, 41, 57)}
"""Numbers of the texts."""


def run(parts: Collection[str] | None = None, mode: str | None = None, texts: int = 4) -> Iterator[dict[str, Any]]:
    """Rows of `parts`: models' names and `retrieval` (default: all), on so many texts.

    With `mode` only the recommended setting of that mode, else all of the sweep. Raises CommandError for other names.
    """
    known = {*SUBJECTS, "retrieval"}
    if parts is not None and not set(parts) <= known:
        raise CommandError(f"parts must be of {', '.join(sorted(known))}, not {', '.join(parts)}")
    folder = model_folder()
    for name in SUBJECTS:
        if parts is not None and name not in parts:
            continue
        settings = sweep(name) if mode is None else [recommended(name, mode)]
        if folder is None:
            yield {"model": name, "mode": mode, "skipped": f"set {MODELS_VARIABLE} to the folder with its texts"}
        else:
            yield from measure(name, settings, folder, _REPORTED[name][:texts])
    if parts is None or "retrieval" in parts:
        yield from retrieval.measure(mode)


@dataclass
class _Losses:
    """One setting on every text."""

    losses: list[float] = field(default_factory=list)
    uses: list[FlashUse] = field(default_factory=list)


def measure(name: str, settings: Sequence[Setting], folder: Path, numbers: Sequence[int]) -> Iterator[dict[str, Any]]:
    """A row for each setting, on the texts with these numbers."""
    model, tokenizer = subject(name, folder)
    dim, attend_dense = model.config.head_dim, recommended(name, AttentionMode.DENSE)
    dense = _Losses()
    found = [_Losses() for _ in settings]
    for ids in held_out(name, tokenizer, folder, list(numbers)):
        prefix, window = Prefix(model, ids[:-_WINDOW]), ids[-_WINDOW:]
        for losses, setting in zip([dense, *found], [attend_dense, *settings], strict=True):
            loss, use = prefix.loss(window, setting.attend)
            losses.losses.append(loss)
            losses.uses.append(use)
    for setting, losses in zip(settings, found, strict=True):
        yield _row(name, setting, losses, dense, dim)


def _row(name: str, setting: Setting, measured: _Losses, dense: _Losses, dim: int) -> dict[str, Any]:
    use = FlashUse.mean(measured.uses)
    delta, error = _delta(np.array(measured.losses), np.array(dense.losses))
    return {
        "model": name,
        "mode": setting.mode,
        **setting.keys,
        "flash_fraction": use.all,
        "flash_fraction_indexed": setting.index_token_bytes / (4 * dim) + use.gather if use.tail else use.all,
        "flash_fraction_pages": use.pages or use.all,
        "index_fraction": use.index,
        "tail_fraction": use.tail,
        "gather_fraction": use.gather,
        "delta_nll_percent": delta,
        "delta_nll_percent_error": error,
        "nll": float(np.mean(measured.losses)),
        "nll_dense": float(np.mean(dense.losses)),
        "texts": len(measured.losses),
        "tokens": TOKENS,
        "positions": _WINDOW,
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
