"""Types of commands' arguments that are numbers, for argparse; every package with a command shares them."""

import argparse
import math

__all__ = ["MOST", "above_zero", "non_negative", "positive", "rate"]


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
