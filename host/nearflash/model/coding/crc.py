"""CRC32C of rows of bytes.

The code is linear: what a byte contributes depends on its value and on how many bytes follow it, and on nothing else.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.crc import CRC_TABLE

__all__ = ["crc32c"]

_ROWS_AT_ONCE = 4096


_TABLE = np.array(CRC_TABLE, np.uint32)


@cache
def _contributions(length: int) -> tuple[NDArray[np.uint32], np.uint32]:
    """Contribution of each byte by its place, (length, 256), and of the register's first value."""
    places = np.empty((length, 256), np.uint32)
    followed, start = _TABLE, np.uint32(0xFFFF_FFFF)
    for byte in reversed(range(length)):
        places[byte] = followed
        followed = followed >> np.uint32(8) ^ _TABLE[followed & np.uint32(0xFF)]
        start = start >> np.uint32(8) ^ _TABLE[start & np.uint32(0xFF)]
    return places, start


def crc32c(data: bytes | NDArray[np.uint8]) -> NDArray[np.uint32]:
    """CRC32C along the last axis: (..., n) bytes give (...) values; `bytes` give a scalar."""
    rows = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
    places, start = _contributions(rows.shape[-1])
    flat, at = rows.reshape(-1, rows.shape[-1]), np.arange(rows.shape[-1])
    crc = np.full(len(flat), start ^ np.uint32(0xFFFF_FFFF), np.uint32)
    for first in range(0, len(flat), _ROWS_AT_ONCE):
        part = slice(first, first + _ROWS_AT_ONCE)
        crc[part] ^= np.bitwise_xor.reduce(places[at, flat[part]], axis=-1)
    return crc.reshape(rows.shape[:-1])
