"""Which NAND block holds each block of a flash: a good one; spares of its LUN queue stand for those that fail."""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import ReadOnlyError, StorageFullError
from nearflash.storage.flash.geometry import FlashGeometry

__all__ = ["BlockMap"]


class BlockMap:
    """Places of blocks: place `row · lun_queues + queue` is a row of NAND blocks of one LUN queue.

    bad: (rows, lun_queues). Counts only: its user erases, programs and moves. Raises StorageFullError where a LUN has
    fewer good rows than the geometry has blocks on it.
    """

    def __init__(self, geometry: FlashGeometry, bad: NDArray[np.bool_]) -> None:
        self._geometry, self._bad, queues = geometry, bad.copy(), geometry.lun_queues
        per_queue = geometry.blocks // queues
        self.places = np.empty(geometry.blocks, np.int64)
        """Of each block."""
        self._spares: list[deque[int]] = []
        for queue in range(queues):
            good = np.flatnonzero(~bad[:, queue]) * queues + queue
            if len(good) < per_queue:
                raise StorageFullError(
                    f"{self._name(queue)} must have {per_queue} good blocks, not {len(good)} of {len(bad)}: take "
                    "fewer blocks_per_lun, or more spare_blocks"
                )
            self.places[queue::queues] = good[:per_queue]
            self._spares.append(deque(good[per_queue:].tolist()))

    @property
    def bad_blocks(self) -> int:
        """Rows of a LUN that are bad."""
        return int(self._bad.sum())

    @property
    def least_spares(self) -> int:
        """Spares of the LUN that has fewest."""
        return min(map(len, self._spares))

    def take(self, queue: int) -> int:
        """A spare place of a LUN queue. Raises ReadOnlyError where there is none."""
        if not self._spares[queue]:
            bad = int(self._bad[:, queue].sum())
            raise ReadOnlyError(
                f"{self._name(queue)} must have a spare for a block that failed, but there is none left ({bad} of "
                f"{len(self._bad)} failed before): nothing more is written to this flash; what was durable can be "
                "read, so copy it to another one"
            )
        return self._spares[queue].popleft()

    def replace(self, block: int, place: int) -> int:
        """The block lies at `place` from now on; the place where it lay."""
        old, self.places[block] = int(self.places[block]), place
        return old

    def retire(self, place: int) -> None:
        """A place is bad: it is used no more."""
        self._bad[divmod(place, self._geometry.lun_queues)] = True

    def _name(self, queue: int) -> str:
        return f"lun {queue // self._geometry.channels} of channel {queue % self._geometry.channels}"
