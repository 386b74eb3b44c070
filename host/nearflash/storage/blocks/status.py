"""Counts and sizes of a file of blocks, from its records alone."""

import datetime
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from nearflash.abi.python310 import UTC
from nearflash.storage.blocks.block_file import BlockFile
from nearflash.storage.blocks.statistics import BlockStatistics

__all__ = ["BlockStatus"]


@dataclass(frozen=True)
class BlockStatus:
    """A file of blocks as it is now. Pins are in no file: they end with the process that has them."""

    path: Path
    namespace: str
    capacity_bytes: int
    used_bytes: int
    """Of the blocks that are there."""
    block_bytes: int
    """Most that a block has."""
    capacity_blocks: int
    life: BlockStatistics
    """Since the file was made."""
    segments: int
    most_erases: int
    """Of one segment."""
    last_durable: str
    """When the file was written last, ISO 8601."""

    @classmethod
    def of(cls, blocks: BlockFile) -> Self:
        """The status of an open file."""
        life, layout = blocks.life, blocks.layout
        written_s = blocks.path.stat().st_mtime
        return cls(
            blocks.path, blocks.label.namespace, layout.file_bytes, blocks.index.used_bytes, layout.block_bytes,
            layout.slots, life, layout.segments, int(blocks.erases.max()),
            datetime.datetime.fromtimestamp(written_s, UTC).isoformat(timespec="seconds"),
        )  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        """The status in JSON's values; `pinned` is null, as no file states it."""
        counts = ("blocks", "stored", "put_bytes", "written_bytes", "written_per_put", "evicted", "moved", "erases")
        own = {name: value for name, value in asdict(self).items() if name not in ("life", "path")}
        return {**own, **{name: getattr(self.life, name) for name in counts}, "pinned": None}

    def lines(self) -> Iterator[str]:
        """The status as a table."""
        life = self.life
        for name, text in (
            ("namespace", self.namespace),
            ("capacity", f"{self.capacity_bytes:,} bytes, {self.capacity_blocks:,} blocks of {self.block_bytes:,}"),
            ("used", f"{self.used_bytes:,} bytes, {life.blocks:,} blocks"),
            ("stored", f"{life.stored:,} blocks, {life.put_bytes:,} bytes, since the file was made"),
            ("evicted", f"{life.evicted:,} blocks; {life.moved:,} moved"),
            ("wear", f"{life.written_per_put:.3f} bytes written for each byte put; {life.erases:,} erases of "
                     f"{self.segments:,} segments, {self.most_erases:,} of one at most"),
            ("pinned", "known to the process that has the file open alone"),
            ("last durable", self.last_durable),
        ):  # fmt: skip
            yield f"  {name:<14}{text}"
