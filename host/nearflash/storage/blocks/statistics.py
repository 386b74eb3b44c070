"""Counts of what a block store did."""

from dataclasses import dataclass, fields

__all__ = ["BlockStatistics"]


@dataclass
class BlockStatistics:
    """Counts since the store was opened, of all its files; those behind `read_bytes` are as of now."""

    hits: int = 0
    misses: int = 0
    """Blocks that were asked for and not served, damaged ones and failed reads among them."""
    damaged: int = 0
    """Blocks whose CRC32C was wrong: torn, of flipped bits, or another's."""
    failed_reads: int = 0
    stored: int = 0
    """Blocks that were put, and are durable."""
    refused: int = 0
    """Blocks that were put and not stored: no room beside pinned ones, too many in flight, or a failed drive."""
    evicted: int = 0
    moved: int = 0
    """Blocks that were moved out of a segment before it was erased, as they are pinned or were used lately."""
    put_bytes: int = 0
    """Of the blocks stored."""
    written_bytes: int = 0
    """To the drives: blocks in whole slots, moved ones, records, erases."""
    read_bytes: int = 0
    blocks: int = 0
    capacity_blocks: int = 0
    pinned: int = 0
    erases: int = 0
    """Of segments, since the files were made."""
    failed_drives: int = 0
    """Files that are read only, as a write has failed."""

    @property
    def written_per_put(self) -> float:
        """Bytes written for each byte put; 0 before the first."""
        return self.written_bytes / self.put_bytes if self.put_bytes else 0.0

    def __add__(self, other: "BlockStatistics") -> "BlockStatistics":
        return BlockStatistics(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))
