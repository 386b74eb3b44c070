"""How pages are numbered: blocks, the unit of erasing, over the LUNs of channels."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.codeword import CODEWORD_BYTES
from nearflash.abi.errors import CommandError

__all__ = ["FlashGeometry", "PageNumbers"]

PageNumbers = NDArray[np.int64]
PAGE_BYTES_LEAST, PAGE_BYTES_MOST = 1 << 12, 1 << 16


@dataclass(frozen=True)
class FlashGeometry:
    """Page `block · pages_per_block + place` is page `place` of a block. Raises CommandError for what cannot be.

    Block b lies on channel b mod channels, there on lun (b // channels) mod luns. A *LUN queue* is the blocks of one
    LUN of one channel: block b is in queue b mod lun_queues.
    """

    page_bytes: int
    """Of data: a power of two, 4,096 to 65,536."""
    pages_per_block: int
    channels: int
    luns: int
    """Of each channel."""
    blocks: int
    """In all, a multiple of lun_queues."""

    def __post_init__(self) -> None:
        size = self.page_bytes
        rules = {
            "page_bytes": (
                PAGE_BYTES_LEAST <= size <= PAGE_BYTES_MOST and size & (size - 1) == 0,
                f"a power of two, {PAGE_BYTES_LEAST} to {PAGE_BYTES_MOST}",
            ),
            "pages_per_block": (self.pages_per_block >= 1, "at least 1"),
            "channels": (1 <= self.channels <= 256, "1 to 256"),
            "luns": (1 <= self.luns <= 256, "1 to 256"),
            "blocks": (
                self.blocks >= 1 and self.lun_queues > 0 and self.blocks % self.lun_queues == 0,
                f"a positive multiple of channels times luns ({self.channels * self.luns})",
            ),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise CommandError(f"{name} must be {rule}, not {getattr(self, name)!r}")

    @property
    def lun_queues(self) -> int:
        """LUNs of all channels."""
        return self.channels * self.luns

    @property
    def pages(self) -> int:
        """Pages in all."""
        return self.blocks * self.pages_per_block

    @property
    def codewords(self) -> int:
        """Codewords of a page."""
        return self.page_bytes // CODEWORD_BYTES

    @property
    def block_bytes(self) -> int:
        """Data bytes of a block."""
        return self.pages_per_block * self.page_bytes

    def runs(self, pages: PageNumbers) -> list[slice]:
        """Cuts `pages` into runs in which each page follows the one before in its block."""
        ends = [*(np.flatnonzero(self._breaks(pages)) + 1).tolist(), len(pages)]
        return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False) if start < end]

    def count_runs(self, pages: PageNumbers) -> int:
        """How many `runs` there are."""
        return int(np.count_nonzero(self._breaks(pages))) + 1 if len(pages) else 0

    def _breaks(self, pages: PageNumbers) -> NDArray[np.bool_]:
        """After which pages, but for the last, a run ends."""
        later = pages[1:]
        breaks: NDArray[np.bool_] = (later - pages[:-1] != 1) | (later % self.pages_per_block == 0)
        return breaks
