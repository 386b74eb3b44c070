"""Which of the files of a state holds which extent."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from nearflash.abi.errors import StateError
from nearflash.storage.state.manifest import Extent

__all__ = ["LONGEST_ROUND", "Stripe"]

LONGEST_ROUND = 1 << 12
"""Extents of a round."""


@dataclass(frozen=True)
class Stripe:
    """Extents over files: of every sum(ratio) consecutive extents file i holds ratio[i], spread evenly.

    name: what the user calls the ratio, in errors.
    """

    ratio: tuple[int, ...]
    name: str = field(default="stripe_ratio", compare=False)

    def __post_init__(self) -> None:
        positive = all(type(share) is int and share >= 1 for share in self.ratio)
        if not self.ratio or not positive:
            raise StateError(f"{self.name} must be an integer of at least 1 for each file, not {self.ratio!r}")
        if sum(self.ratio) > LONGEST_ROUND:
            raise StateError(
                f"{self.name} must sum to at most {LONGEST_ROUND}, not {self.ratio!r}: give 3,1 for 3000,1000"
            )

    @classmethod
    def among(cls, files: int, ratio: Iterable[int] | None, name: str = "stripe_ratio") -> "Stripe":
        """A stripe over so many files, evenly where no ratio is given. Raises StateError."""
        stripe = cls(tuple(ratio) if ratio is not None else (1,) * files, name)
        if len(stripe.ratio) != files:
            raise StateError(f"{name} must be of {files} files, not {stripe.ratio!r}")
        return stripe

    @cached_property
    def _round(self) -> tuple[int, ...]:
        """Files in the order of one round: each extent goes to the file with the largest unmet share."""
        unmet, order = [0] * len(self.ratio), []
        for _ in range(sum(self.ratio)):
            unmet = [before + share for before, share in zip(unmet, self.ratio, strict=True)]
            order.append(unmet.index(max(unmet)))
            unmet[order[-1]] -= sum(self.ratio)
        return tuple(order)

    def file_of(self, extent: Extent) -> int:
        """The file that holds the extent."""
        return self.file_at(extent.index)

    def file_at(self, index: int) -> int:
        """The file that holds the extent of that index."""
        return self._round[index % len(self._round)]

    def extents_of(self, file: int, extents: Iterable[Extent]) -> tuple[Extent, ...]:
        """The extents, of those given, that the file holds, in order."""
        return tuple(extent for extent in extents if self.file_of(extent) == file)
