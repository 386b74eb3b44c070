"""Arguments of commands that are numbers, and options that would be without effect; every package shares them."""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass

from nearflash.abi.errors import CommandError

__all__ = [
    "MOST",
    "Ineffective",
    "above_zero",
    "counts",
    "declare_ineffective",
    "non_negative",
    "positive",
    "rate",
    "reject_ineffective",
]


MOST = 1 << 53
"""The largest whole number of a command: floating-point numbers hold all up to it."""


def non_negative(text: str, least: int = 0, most: int = MOST) -> int:
    """A whole number, 0 or more, `most` at most."""
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if not least <= number <= most:
        rule = f"{least} or more" if number < least else f"{most} at most"
        raise argparse.ArgumentTypeError(f"must be a whole number, {rule}, not {text!r}")
    return number


def positive(text: str, most: int = MOST) -> int:
    """A whole number, 1 or more, `most` at most."""
    return non_negative(text, 1, most)


def counts(text: str) -> tuple[int, ...]:
    """Whole numbers, 1 or more, with commas between."""
    return tuple(positive(part) for part in text.split(","))


def rate(text: str) -> float:
    """A finite number, 0 or more."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number, 0 or more, not {text!r}")
    return number


def above_zero(text: str, most: float = math.inf, what: str = "number") -> float:
    """A number above 0 and below `most`; what: its name in the error."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < most:
        raise argparse.ArgumentTypeError(f"must be a {what} above 0, not {text!r}")
    return number


@dataclass(frozen=True)
class Ineffective:
    """Options of a command, by their destinations, that have no effect beside some others."""

    names: tuple[str, ...]
    applies: Callable[[argparse.Namespace], object]
    """Whether the others are so that these have none."""
    rule: str
    """What the names must be: `left out with --measure, which lists nothing`."""


def declare_ineffective(parser: argparse.ArgumentParser, *rules: Ineffective) -> None:
    """Have a command, once parsed, refused by `reject_ineffective` where one of these options is given in vain."""
    parser.set_defaults(ineffective=(parser, rules))


def reject_ineffective(arguments: argparse.Namespace, *found: Ineffective) -> None:
    """Raise CommandError for options that are given, other than their defaults, where a rule applies: one of those that
    the command declared, or of those `found`, of what only its files tell."""
    if not hasattr(arguments, "ineffective"):
        return
    parser, declared = arguments.ineffective
    for rule in found or declared:
        given = [name for name in rule.names if getattr(arguments, name) != parser.get_default(name)]
        if given and rule.applies(arguments):
            options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise CommandError(f"{options} must be {rule.rule}")
