"""`nearflash compress --target`: the forms of a model's layers chosen for a size or a loss, written, and measured."""

import argparse
import math
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nearflash.abi.errors import CommandError

if TYPE_CHECKING:
    from nearflash.weights.search import MeasuredForm

__all__ = [
    "CompressionTarget",
    "TargetError",
    "check_outcome",
    "parse_target",
    "search_layers",
    "tabulate",
]

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(K|M|G|Ki|Mi|Gi)?B")
_WINDOWS = 4
"""Held-out windows that each layer's forms are measured on; the whole is measured on all of them."""

_ROUNDING = 1e-5
"""Nats by which two measurements of the same weights differ at most: sums in another order."""


class TargetError(CommandError):
    """A size or a loss that no choice of forms reaches; it says the nearest that one does."""


@dataclass(frozen=True)
class CompressionTarget:
    """A bound of a compressed model: bytes, a share of its dense bytes, or a loss."""

    text: str
    bytes: float | None = None
    fraction: float | None = None
    loss: float | None = None
    """Nats a token more than the model has."""

    def room_bytes(self, dense_bytes: int) -> int | None:
        """Bytes of the weights' files, where the target is a size."""
        if self.fraction is not None:
            return int(self.fraction * dense_bytes)
        return None if self.bytes is None else int(self.bytes)


def parse_target(text: str) -> CompressionTarget:
    """A target as a command line has it: 0.5, 500MB, 1.5GiB or +0.02."""
    try:
        if text.startswith("+") and math.isfinite(loss := float(text)):
            return CompressionTarget(text, loss=loss)
        if match := _SIZE.fullmatch(text):
            return CompressionTarget(text, bytes=float(match[1]) * _UNITS[match[2] or ""])
        if 0 < (fraction := float(text)) < 1:
            return CompressionTarget(text, fraction=fraction)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"must be a share below 1, a size like 500MB, or a loss like +0.02, not {text!r}")


def search_layers(
    model: Any, tokens: tuple[Any, Any], arguments: argparse.Namespace, dtype: Any, progress: Any
) -> tuple[dict[str, tuple[str, int]], dict[str, Any]]:
    """Choose the layers' forms and prune the model so: formats and bits of its weights by name, and the report's part.

    tokens: windows to calibrate on, and others. progress: gives one for a count. Raises TargetError, with the model as
    it was.
    """
    from nearflash.weights.convert import count_bytes, layer_weights
    from nearflash.weights.search import LayerSearch, list_steps, pick_by_size

    target, (calibration, others) = arguments.target, tokens
    dense_bytes, other_bytes = count_bytes(model, dtype, layer_weights(model))
    search, room = LayerSearch(model, calibration, arguments.method, dtype), target.room_bytes(dense_bytes)
    if room is not None and (least := search.least_bytes() + other_bytes) > room:
        raise TargetError(f"target must be {least / 1e6:.1f}MB or more for this model, not {target.text}, "
                          f"{room / 1e6:.1f}MB: all layers in their smallest form take that")  # fmt: skip
    bar, measured = progress(search.layers * len(search.choices)), []
    for each in search.measure(others[:_WINDOWS]):
        measured.append(each)
        bar.advance(f"layer {each.layer}, {each.choice.name}")
    steps = list_steps(measured, search.layers)
    if room is None:
        chosen = _pick_by_loss(search, steps, others, target)
    else:
        chosen = pick_by_size(steps, room - other_bytes)
    forms = search.apply({layer: each.choice for layer, each in chosen.items()})
    lossless = {each.layer: each.loss for each in measured if each.choice == search.choices[0]}
    rows = [{"layer": each.layer, "choice": each.choice.name, "bytes": each.stored_bytes,
             "loss_increase": each.loss - lossless[each.layer], "chosen": chosen[each.layer] is each}
            for each in measured]  # fmt: skip
    return forms, {"asked": target.text, "windows": len(others), "layers": rows}


def _pick_by_loss(
    search: Any, steps: "list[dict[int, MeasuredForm]]", others: Any, target: CompressionTarget
) -> "dict[int, MeasuredForm]":  # fmt: skip
    from nearflash.weights.search import pick_by_loss

    base, most = search.measure_loss({}, others), target.loss or 0.0

    def measure(step: "dict[int, MeasuredForm]") -> float:
        loss = search.measure_loss({layer: each.choice for layer, each in step.items()}, others) - base
        print(f"measured as a whole: {loss:+.4f} nats", file=sys.stderr, flush=True)
        return float(loss)

    if (least := measure(steps[0])) > most:
        raise TargetError(f"target must be {least:+.4f} or more for this model, not {target.text}: its weights lose "
                          "that in 16 bits")  # fmt: skip
    return pick_by_loss(steps, most, measure)


def check_outcome(target: CompressionTarget, report: dict[str, Any]) -> None:
    """Raise TargetError where what was written, measured, is not what was asked for."""
    dense_bytes = report["bytes"] / report["bytes_fraction_of_dense"]
    room, perplexity = target.room_bytes(round(dense_bytes)), report["perplexity"]
    if room is not None and report["bytes"] > room:
        raise TargetError(f"target must be {report['bytes'] / 1e6:.1f}MB or more for this model, not {target.text}")
    loss = math.log(perplexity["after"] / perplexity["before"])
    if target.loss is not None and loss > target.loss + _ROUNDING:
        raise TargetError(f"target must be {loss:+.4f} or more for this model, not {target.text}")


def tabulate(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of a table: layer, form, bytes, nats more; what is chosen has a star."""
    head = f"{'layer':>5}  {'form':<18}{'MB':>9}  {'nats':>8}"
    return [head, *(f"{row['layer']:>5}  {row['choice']:<18}{row['bytes'] / 1e6:>9.3f}  {row['loss_increase']:>+8.4f}"
                    f"{' *' if row['chosen'] else ''}" for row in rows)]  # fmt: skip
