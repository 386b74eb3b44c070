"""Device `host` of the expand kernel: the same commands on the host's cores, for machines without a board."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.device.backends.host.matrix import read_dense_rows
from nearflash.device.drivers.expand import SoftwareExpandDevice

__all__ = ["ExpandHostDevice"]


class ExpandHostDevice(SoftwareExpandDevice):
    """Expands with numpy, row by row; rows before a fault may have been written."""

    BACKEND = "host"
    DEFAULT_BUILD = "smartssd"

    def _rows(self, stream: NDArray[np.uint8]) -> Iterator[tuple[NDArray[Any], int]]:
        return read_dense_rows(stream)
