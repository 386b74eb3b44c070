"""CRC32C of rows of bytes."""

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attend.codeword import CRC_POLYNOMIAL

__all__ = ["crc32c"]


def _table() -> NDArray[np.uint32]:
    values = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        values = values >> np.uint32(1) ^ np.where(values & 1, np.uint32(CRC_POLYNOMIAL), np.uint32(0))
    return values


_TABLE = _table()


def crc32c(data: bytes | NDArray[np.uint8]) -> NDArray[np.uint32]:
    """CRC32C along the last axis: (..., n) bytes give (...) values; `bytes` give a scalar."""
    rows = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
    crc = np.full(rows.shape[:-1], 0xFFFF_FFFF, np.uint32)
    for column in np.moveaxis(rows, -1, 0):
        crc = crc >> np.uint32(8) ^ _TABLE[(crc ^ column) & np.uint32(0xFF)]
    return crc ^ np.uint32(0xFFFF_FFFF)
