"""Device `model` of the expand kernel: the bit-exact reference, for correctness rather than speed."""

import numpy as np
from numpy.typing import NDArray

from nearflash.device.drivers.expand import SoftwareExpandDevice
from nearflash.model.weights.bitmap import expand, read_rows
from nearflash.model.weights.levels import read_blocks

__all__ = ["ExpandModelDevice"]


class ExpandModelDevice(SoftwareExpandDevice):
    """Runs each command through nearflash.model; of a faulty matrix it writes nothing."""

    BACKEND = "model"

    def _expand(self, stream: NDArray[np.uint8], out: NDArray[np.uint8]) -> int:
        text = stream.tobytes()
        dense = np.array(expand(text)).view(np.uint8)
        out[:, : dense.shape[1]] = dense
        return sum(int(row.present.sum()) for row in read_rows(text))

    def _expand_coded(self, stream: NDArray[np.uint8], out: NDArray[np.uint16]) -> int:
        blocks = list(read_blocks(stream.tobytes()))
        np.concatenate([dense for dense, _ in blocks], out=out)
        return sum(values for _, values in blocks)
