"""The commands `nearflash preflight` and `nearflash train`."""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from nearflash.abi.rules import AdagradStep, AdamStep, LionStep, OptimizerStep, SgdStep, StateFormat

__all__ = ["preflight"]

_RULES: dict[str, Callable[..., OptimizerStep]] = {
    "adam": partial(AdamStep, 0.0, 1),
    "sgd": partial(SgdStep, 0.0, 1, momentum=0.9),
    "adagrad": partial(AdagradStep, 0.0, 1),
    "lion": partial(LionStep, 0.0, 1),
}
_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9}


def preflight(subparsers: Any) -> None:
    """Add `nearflash preflight PATH… --params N`; exit code 1 where a path cannot take its share of the state."""
    parser = subparsers.add_parser("preflight", help="can optimizer state lie there, how fast, and for how long")
    parser.add_argument("paths", nargs="+", type=Path, help="folders or state files, one a drive; equal shares")
    parser.add_argument("--params", required=True, type=_count, help="of the model, as 135M or 7B")
    parser.add_argument("--optimizer", default="adam", choices=_RULES)
    parser.add_argument("--state-format", default=StateFormat.FP32, type=StateFormat, choices=[*StateFormat])
    parser.add_argument("--tbw", type=float, metavar="TB", help="the drive's rated writes, in terabytes")
    parser.add_argument("--no-measure", action="store_true", help="write no file to measure rates with")
    parser.set_defaults(run=_preflight)


def _preflight(arguments: argparse.Namespace) -> int:
    from nearflash.training.preflight import Level, State, preflight

    rule = _RULES[arguments.optimizer](state_format=arguments.state_format)
    share = State(-(-arguments.params // len(arguments.paths)), rule)
    refused = 0
    for path in arguments.paths:
        print(f"{path}:")
        for finding in preflight(path, share, rated_tb=arguments.tbw, measure=not arguments.no_measure):
            print(f"  {finding}")
            refused += finding.level is Level.ERROR
    return 1 if refused else 0


def _count(text: str) -> int:
    unit = _UNITS.get(text[-1:].upper(), 0.0)
    try:
        count = int(float(text[:-1] if unit else text) * (unit or 1))
    except (ValueError, OverflowError):
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"must be a count such as 135M or 7B, not {text!r}")
    return count
