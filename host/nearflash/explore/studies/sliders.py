"""Data of the report's sliders: a value for each system at every combination of what can be chosen.

A study is {axes, names, cells, unit, lowest, hidden}; the last axis varies fastest; a cell has a value, or None where
a system does not fit, for each name. lowest: the smallest is the best; hidden: names left out where they do not fit.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

from nearflash.explore.outcome import Outcome
from nearflash.explore.shapes import list_trained
from nearflash.explore.studies.sweeps import run_serving_systems
from nearflash.explore.systems.ifc import QUANTS, Arrangement, Decode
from nearflash.explore.systems.instinfer import Serving
from nearflash.explore.systems.kvnand import decode_step, splits
from nearflash.explore.systems.smart_infinity import METHODS, Training, training_step

__all__ = ["slider_studies"]

_MODELS = ("llama3.1-70b", "llama3.1-8b", "llama2-7b", "opt-30b", "mixtral-8x7b")
_CONTEXTS = (128, 256, 512, 1_000, 2_000, 5_000, 10_000, 20_000, 30_000, 50_000, 75_000, 100_000, 128_000)
_DIES = (4, 8, 16)
_BATCHES = (4, 8, 16, 32, 64, 128, 256)
_GPUS = ("a4000", "a5000", "a100")


def slider_studies() -> dict[str, Any]:
    """All studies by name."""
    return {"kvnand": _kvnand(), "instinfer": _instinfer(), "training": _training()}


def _axis(name: str, values: Sequence[Any], start: int) -> dict[str, Any]:
    return {"name": name, "values": list(values), "start": start, "numbers": not isinstance(values[0], str)}


def _kvnand() -> dict[str, Any]:
    """Milliseconds a token of every split of the dies, and of the baselines."""
    bases = [Arrangement("Base-1"), Arrangement("Base-2")]
    every = bases + [arrangement for dies in _DIES for arrangement in splits(dies)]
    cells = []
    for model, quant, dies, context in product(_MODELS, QUANTS, _DIES, _CONTEXTS):
        decode, mine = Decode(model, context, quant), {each.name for each in (*bases, *splits(dies))}
        cells.append([_milliseconds(decode_step(decode, each)) if each.name in mine else None for each in every])
    axes = [_axis("model", _MODELS, 0), _axis("bits", list(QUANTS), 2), _axis("dies", _DIES, 1),
            _axis("context", _CONTEXTS, 11)]  # fmt: skip
    names = [each.name for each in every]
    return {"axes": axes, "names": names, "cells": cells, "unit": "ms", "lowest": True, "hidden": names[2:]}


def _milliseconds(found: Outcome) -> float | None:
    return _round(1e3 * found.seconds) if found.fits else None


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def _instinfer() -> dict[str, Any]:
    """Tokens a second in decode of every system on InstInfer's host."""
    names: list[str] = []
    cells = []
    for batch, drives in product(_BATCHES, range(1, 21)):
        found = list(run_serving_systems(Serving(batch=batch), drives))
        names = [outcome.system.partition(",")[0] for outcome in found]
        cells.append([_round(outcome.rate) if outcome.fits else None for outcome in found])
    axes = [_axis("batch", _BATCHES, 4), _axis("drives", range(1, 21), 1)]
    return {"axes": axes, "names": names, "cells": cells, "unit": "token/s", "lowest": False, "hidden": []}


def _training() -> dict[str, Any]:
    """Seconds of a training step by every method."""
    models = list_trained()
    cells = [
        [_round(training_step(Training(model, method, drives, gpu)).seconds) for method in METHODS]
        for model, gpu, drives in product(models, _GPUS, range(1, 13))
    ]
    axes = [_axis("model", models, 2), _axis("GPU", _GPUS, 1), _axis("drives", range(1, 13), 5)]
    return {"axes": axes, "names": list(METHODS), "cells": cells, "unit": "s", "lowest": True, "hidden": []}
