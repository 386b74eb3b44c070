"""Report of a self test on each thing that it compared."""

from dataclasses import dataclass

__all__ = ["Comparison"]


@dataclass(frozen=True)
class Comparison:
    """How far a device and the model agree on one case."""

    case: str
    """What was computed."""
    words: int
    """Elements of the outputs that were compared."""
    mismatches: int
