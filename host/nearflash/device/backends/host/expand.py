"""Device `host` of the expand kernel: the same commands on the host's cores, for machines without a board."""

import numpy as np
from numpy.typing import NDArray

from nearflash.device.backends.host.coded import expand_coded
from nearflash.device.backends.host.matrix import expand_into
from nearflash.device.drivers.expand import SoftwareExpandDevice

__all__ = ["ExpandHostDevice"]


class ExpandHostDevice(SoftwareExpandDevice):
    """Expands in threads; rows before a fault may have been written."""

    BACKEND = "host"
    DEFAULT_BUILD = "smartssd"

    def _expand(self, stream: NDArray[np.uint8], out: NDArray[np.uint8]) -> int:
        return expand_into(stream, out)

    def _expand_coded(self, stream: NDArray[np.uint8], out: NDArray[np.uint16]) -> int:
        return expand_coded(stream, out)
