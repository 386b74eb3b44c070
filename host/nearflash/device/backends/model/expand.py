"""Device `model` of the expand kernel: the bit-exact reference, for correctness rather than speed."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.device.drivers.expand import SoftwareExpandDevice
from nearflash.model.weights.bitmap import expand, read_rows

__all__ = ["ExpandModelDevice"]


class ExpandModelDevice(SoftwareExpandDevice):
    """Runs each command through nearflash.model; of a faulty matrix it writes nothing."""

    BACKEND = "model"

    def _rows(self, stream: NDArray[np.uint8]) -> Iterator[tuple[NDArray[Any], int]]:
        text = stream.tobytes()
        counts = [int(row.present.sum()) for row in read_rows(text)]
        return zip(expand(text), counts, strict=True)
