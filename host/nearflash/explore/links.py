"""Links between parts, and one link that several drives share."""

from dataclasses import dataclass
from typing import ClassVar

__all__ = ["DramMemory", "Link", "raid0_rate"]


@dataclass(frozen=True)
class Link:
    """A link, and the share of its raw rate that transfers reach."""

    source: str
    raw_bytes_per_s: float
    reached_fraction: float

    @property
    def bytes_per_s(self) -> float:
        """Rate of transfers."""
        return self.raw_bytes_per_s * self.reached_fraction

    def seconds(self, moved_bytes: float) -> float:
        """Seconds of a transfer, one direction."""
        return moved_bytes / self.bytes_per_s


@dataclass(frozen=True)
class DramMemory:
    """One channel of DRAM, or one stack."""

    FILE: ClassVar[str] = "memory"

    source: str
    bytes_per_s: float
    channel_bytes: float


def raid0_rate(drive_bytes_per_s: float, drives: int, shared: Link) -> float:
    """Bytes a second of so many drives behind one link: RAID0 stops scaling where the link is full."""
    return min(drive_bytes_per_s * drives, shared.bytes_per_s)
