"""`nearflash compress --target`: the forms of a model's layers chosen for a size or a loss, written, and measured."""

import argparse
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nearflash.abi.errors import CommandError

if TYPE_CHECKING:
    from nearflash.weights.search import MeasuredForm

__all__ = [
    "CompressionTarget",
    "TargetError",
    "TargetSearch",
    "check_outcome",
    "parse_target",
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


class TargetSearch:
    """The search for a target, after a look at whether it can be reached and an estimate of its time.

    tokens: windows to calibrate on, and others. Raises TargetError for a size that no choice of forms reaches.
    """

    def __init__(self, model: Any, tokens: tuple[Any, Any], arguments: argparse.Namespace, dtype: Any) -> None:
        from nearflash.weights.convert import count_bytes, layer_weights
        from nearflash.weights.search import LayerSearch

        self._target, self._method, (self._calibration, self._others) = arguments.target, arguments.method, tokens
        dense_bytes, self._other_bytes = count_bytes(model, dtype, layer_weights(model))
        self._search, self._room = LayerSearch(model, arguments.method, dtype), self._target.room_bytes(dense_bytes)
        if self._room is not None and (least := self._search.least_bytes() + self._other_bytes) > self._room:
            raise self._too_small(least)
        start = time.perf_counter()
        self._lossless = self._search.list_lossless()
        lossless = sum(each.stored_bytes for each in self._lossless) + self._other_bytes
        packing_s, start = time.perf_counter() - start, time.perf_counter()
        self._is_lossless = self._room is not None and lossless <= self._room
        if not self._is_lossless:
            self._search.measure_loss({}, self._others[:1])
            self._print_estimate(time.perf_counter() - start, packing_s)

    def _too_small(self, least: float) -> TargetError:
        return TargetError(f"target must be {least / 1e6:.1f}MB or more for this model, not {self._target.text}, "
                           f"{(self._room or 0) / 1e6:.1f}MB: all layers in their smallest form take that")  # fmt: skip

    def _print_estimate(self, window_s: float, packing_s: float) -> None:
        """State how long the search takes, by the seconds of one window and of one form of all layers."""
        from nearflash.weights.sensitivity import DRAWS

        forms, layers = len(self._search.choices), self._search.layers
        windows = len(self._calibration) * (self._method not in ("none", "magnitude"))
        windows += min(_WINDOWS, len(self._others)) * (2 * forms + 2 * DRAWS + 2) + 2 * len(self._others)
        if self._room is None:
            windows += len(self._others) * math.ceil(math.log2(forms * layers))
        seconds = window_s * windows + packing_s * 2 * forms
        print(f"search: {forms} forms of {layers} layers, about {seconds:.0f} s", file=sys.stderr, flush=True)

    def run(self, progress: Callable[[str, int], Any]) -> tuple[dict[str, tuple[str, int]], dict[str, Any]]:
        """Choose the layers' forms and prune the model so: formats and bits of its weights by name, the report's part.

        progress: gives one for what is done and how often. Raises TargetError, with the model as it was.
        """
        from nearflash.weights.search import list_steps, pick_by_size

        search = self._search
        measured = list(self._measure(progress))
        steps = list_steps(measured, search.layers)
        if self._room is None:
            chosen = self._pick_by_loss(steps)
        else:
            chosen = pick_by_size(steps, self._room - self._other_bytes)
            if (least := sum(each.stored_bytes for each in chosen.values()) + self._other_bytes) > self._room:
                raise self._too_small(least)
        forms = search.apply({layer: each.choice for layer, each in chosen.items()})
        rows = [{"layer": each.layer, "choice": each.choice.name, "bits": each.choice.bits,
                 "method": self._method if each.choice.sparsity else "none", "density": 1 - each.choice.sparsity,
                 "bytes": each.stored_bytes, "loss_increase": each.loss, "chosen": chosen[each.layer] is each,
                 "bytes_fraction_of_dense": each.stored_bytes / max(search.dense_bytes(each.layer), 1)}
                for each in sorted(measured, key=lambda each: each.layer)]  # fmt: skip
        return forms, {"asked": self._target.text, "windows": len(self._others), "layers": rows}

    def _measure(self, progress: Callable[[str, int], Any]) -> "Iterator[MeasuredForm]":
        search, windows = self._search, self._others[:_WINDOWS]
        if self._is_lossless:
            yield from self._lossless
            return
        bar = progress("pruned", search.layers)
        for layer in search.calibrate(self._calibration):
            bar.advance(f"layer {layer}")
        gradients, bar = progress("differentiated", len(windows)), progress("measured", len(search.choices))
        for forms in search.measure(windows, gradients.advance):
            yield from forms
            bar.advance(f"{forms[0].choice.name} in all layers: {sum(each.loss for each in forms):+.4f} nats")

    def _pick_by_loss(self, steps: "list[dict[int, MeasuredForm]]") -> "dict[int, MeasuredForm]":
        from nearflash.weights.search import pick_by_loss

        base, most = self._search.measure_loss({}, self._others), self._target.loss or 0.0

        def measure(step: "dict[int, MeasuredForm]") -> float:
            choices = {layer: each.choice for layer, each in step.items()}
            loss = self._search.measure_loss(choices, self._others) - base
            print(f"measured as a whole: {loss:+.4f} nats", file=sys.stderr, flush=True)
            return float(loss)

        if (least := measure(steps[0])) > most:
            raise TargetError(f"target must be {least:+.4f} or more for this model, not {self._target.text}: its "
                              "weights lose that in 16 bits")  # fmt: skip
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
    """Lines of a table of the forms that were chosen, a layer each."""
    head = f"{'layer':>5}  {'method':<10}{'density':>7}{'bits':>6}{'of dense':>10}  {'nats (estimated)':>16}"
    return [head, *(f"{row['layer']:>5}  {row['method']:<10}{row['density']:>7.2f}{row['bits']:>6}"
                    f"{row['bytes_fraction_of_dense']:>10.3f}  {row['loss_increase']:>+16.4f}"
                    for row in rows if row["chosen"])]  # fmt: skip
