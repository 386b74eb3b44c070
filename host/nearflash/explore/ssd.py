"""A drive in closed form: channels of LUNs whose planes sense pages while the link moves others.

      cells --tR--> page register --(page + spare) / rate, and commands--> controller

A channel moves a page in `transfer` seconds if enough planes sense beside it; else its planes bound it: dies x planes a
channel >= rate x tR / page.
"""

import math
from dataclasses import dataclass

__all__ = ["Ssd"]


@dataclass(frozen=True)
class Ssd:
    """Geometry and timing of a drive. luns: of a channel; planes: of a LUN, all of which sense at once."""

    source: str
    channels_count: int
    luns_count: int
    planes_count: int
    page_bytes: int
    spare_bytes: int
    pages_per_block_count: int
    blocks_per_plane_count: int
    read_us: float
    program_us: float
    erase_us: float
    overhead_us: float
    link_bytes_per_s: float

    @property
    def flash_bytes(self) -> int:
        """Data that the drive holds."""
        planes = self.channels_count * self.luns_count * self.planes_count
        return planes * self.blocks_per_plane_count * self.pages_per_block_count * self.page_bytes

    @property
    def transfer_s(self) -> float:
        """A page on the link: data, spare, commands and status."""
        return (self.page_bytes + self.spare_bytes) / self.link_bytes_per_s + self.overhead_us * 1e-6

    @property
    def raw_bytes_per_s(self) -> float:
        """All links, without spare bytes and commands."""
        return self.channels_count * self.link_bytes_per_s

    def _cycle_s(self, cells_us: float, erase_share_s: float = 0.0) -> float:
        """Between two pages of a channel: the link's time, or that of cells over the planes that work at once.

        The register of a plane is not free to sense again until its page has left.
        """
        planes = self.luns_count * self.planes_count
        busy = cells_us * 1e-6 + erase_share_s + self.planes_count * self.transfer_s
        return max(self.transfer_s, busy / planes)

    def read_s(self, pages: int) -> float:
        """Seconds to read pages spread evenly over channels and LUNs, requested all at once."""
        return self._batch_s(pages, self.read_us * 1e-6)

    def program_s(self, pages: int) -> float:
        """Seconds to program pages spread evenly, into erased blocks; the last ones have to be in the cells."""
        return self._batch_s(pages, self.program_us * 1e-6)

    def _batch_s(self, pages: int, cells_s: float) -> float:
        """Rounds of all LUNs, one after another on the link; or the link alone, and the cells once."""
        if not pages:
            return 0.0
        pages_per_channel = math.ceil(pages / self.channels_count)
        of_lun = math.ceil(pages_per_channel / self.luns_count)
        rounds = math.ceil(of_lun / self.planes_count)
        batch_s = self.planes_count * self.transfer_s
        # LUNs begin one batch of the link apart; of the last round, only those that still have pages count.
        last = of_lun - (rounds - 1) * self.planes_count
        busy = self.luns_count if last > 1 else pages_per_channel - (of_lun - 1) * self.luns_count
        in_cells = rounds * cells_s + (rounds - 1) * batch_s
        if rounds > 1:
            in_cells += (busy - 1) * batch_s + last * self.transfer_s
        return max(in_cells, cells_s + pages_per_channel * self.transfer_s)

    @property
    def read_bytes_per_s(self) -> float:
        """Rate of data, in the long run."""
        return self.channels_count * self.page_bytes / self._cycle_s(self.read_us)

    @property
    def program_bytes_per_s(self) -> float:
        """Rate of data, in the long run, each block erased before."""
        erase = self.erase_us * 1e-6 / self.pages_per_block_count
        return self.channels_count * self.page_bytes / self._cycle_s(self.program_us, erase)
