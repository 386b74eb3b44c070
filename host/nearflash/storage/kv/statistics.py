"""Counts of what a KV store did to its flash."""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

__all__ = ["Cause", "KvStatistics"]


class Cause(StrEnum):
    """Why a page was programmed."""

    TOKEN = "token"
    INDEX = "index"
    PARTIAL = "partial"
    """The last tokens of a kept sequence, which fill no KV page group yet."""
    COLLECTION = "collection"
    """Moved out of a block with dead pages."""
    DISTURB = "disturb"
    """Moved out of a block that was read often."""


@dataclass(frozen=True)
class KvStatistics:
    """Counts since the store was made."""

    host_bytes: int
    """K and V appended."""
    read_pages: int
    programmed: dict[Cause, int]
    """Pages by cause."""
    page_bytes: int
    live_pages: int
    erases: NDArray[np.int64]
    """Of each block."""
    reads: NDArray[np.int64]
    """Page reads of each block since its erase."""

    @property
    def programmed_bytes(self) -> int:
        """Data of all pages programmed."""
        return sum(self.programmed.values()) * self.page_bytes

    @property
    def write_amplification(self) -> float:
        """Bytes programmed for each byte appended; 0 before the first."""
        return self.programmed_bytes / self.host_bytes if self.host_bytes else 0.0
