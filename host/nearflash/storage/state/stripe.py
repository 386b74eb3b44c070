"""Which of the files of a state holds which extent."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from nearflash.abi.errors import StateError
from nearflash.storage.state.manifest import Extent

__all__ = ["Deal"]


@dataclass(frozen=True)
class Deal:
    """Extents dealt round: of every sum(weights) consecutive ones, file i gets weights[i], spread evenly."""

    weights: tuple[int, ...]

    def __post_init__(self) -> None:
        whole = all(isinstance(weight, int) and weight >= 1 for weight in self.weights)
        if not self.weights or not whole:
            raise StateError(f"weights must be an integer of at least 1 for each file, not {self.weights!r}")

    @classmethod
    def among(cls, files: int, weights: Iterable[int] | None) -> "Deal":
        """A deal among so many files, evenly where no weights are given. Raises StateError."""
        deal = cls(tuple(weights) if weights is not None else (1,) * files)
        if len(deal.weights) != files:
            raise StateError(f"weights must be of {files} files, not {deal.weights!r}")
        return deal

    @cached_property
    def _round(self) -> tuple[int, ...]:
        """Files in the order of one round: always the one that is furthest behind its share."""
        behind, order = [0] * len(self.weights), []
        for _ in range(sum(self.weights)):
            behind = [mine + weight for mine, weight in zip(behind, self.weights, strict=True)]
            order.append(behind.index(max(behind)))
            behind[order[-1]] -= sum(self.weights)
        return tuple(order)

    def file_of(self, extent: Extent) -> int:
        """The file that holds the extent."""
        return self._round[extent.index % len(self._round)]

    def extents_of(self, file: int, extents: Iterable[Extent]) -> tuple[Extent, ...]:
        """Those of `extents` that the file holds, in order."""
        return tuple(extent for extent in extents if self.file_of(extent) == file)
