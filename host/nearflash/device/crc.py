"""CRC32C of many short messages at once, with numpy alone: a word of each in every step.

Zeros before a message do not change a register that begins at zero, so that messages of different lengths are aligned
at their ends; the register's true first value is added to the message's first four bytes instead.
"""

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.crc import CRC_TABLE

__all__ = ["crc32c_of_words"]

_ROWS_AT_ONCE = 1024


def _tables() -> NDArray[np.uint32]:
    """[k, byte]: what a byte with k more bytes behind it in its word leaves in the register, (8, 256)."""
    one = np.array(CRC_TABLE, np.uint32)
    tables = [one]
    for _ in range(7):
        tables.append(tables[-1] >> np.uint32(8) ^ one[tables[-1] & np.uint32(0xFF)])
    return np.array(tables)


_TABLES = _tables()


def crc32c_of_words(
    words: NDArray[np.uint64], starts: NDArray[np.int64], counts: NDArray[np.int64], first: NDArray[np.uint64]
) -> NDArray[np.uint32]:
    """CRC32C (n,) of messages of `counts` words at `starts`, (n,), whose first word is replaced by `first`, (n,)."""
    crcs = np.empty(len(starts), np.uint32)
    for at in range(0, len(starts), _ROWS_AT_ONCE):
        rows = slice(at, at + _ROWS_AT_ONCE)
        crcs[rows] = _aligned(words, starts[rows], counts[rows], first[rows])
    return crcs


def _aligned(
    words: NDArray[np.uint64], starts: NDArray[np.int64], counts: NDArray[np.int64], first: NDArray[np.uint64]
) -> NDArray[np.uint32]:
    crc = np.zeros(len(starts), np.uint32)
    longest = int(counts.max(initial=0))
    begun = first ^ np.uint64(0xFFFF_FFFF)
    for step in range(longest):
        place = counts - longest + step
        word = np.where(place > 0, words[starts + np.maximum(place, 0)], np.where(place == 0, begun, np.uint64(0)))
        octets = (word ^ crc).view(np.uint8).reshape(-1, 8)
        crc = np.bitwise_xor.reduce(_TABLES[np.arange(7, -1, -1), octets], axis=1)
    return ~crc
