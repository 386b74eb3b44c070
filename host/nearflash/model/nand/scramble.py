"""The sequence that codewords on NAND are scrambled with."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearflash.abi.attention.codeword import RAW_BYTES, SCRAMBLE_POLYNOMIAL, SCRAMBLE_SKIP, scramble_seed

__all__ = ["scrambling"]

_BITS = SCRAMBLE_POLYNOMIAL.bit_length() - 1


def _sequences() -> NDArray[np.uint8]:
    """(20, RAW_BYTES): what each bit of the seed contributes."""
    states = 1 << np.arange(_BITS)
    bits = np.empty((_BITS, 8 * RAW_BYTES), np.uint8)
    for step in range(-SCRAMBLE_SKIP, 8 * RAW_BYTES):
        if step >= 0:
            bits[:, step] = states & 1
        states = states << 1 ^ np.where(states >> (_BITS - 1), SCRAMBLE_POLYNOMIAL, 0)
    return np.packbits(bits, axis=1, bitorder="little")


_SEQUENCES = _sequences()


def scrambling(row: ArrayLike, lun: ArrayLike, places: NDArray[np.integer]) -> NDArray[np.uint8]:
    """(N, RAW_BYTES): the sequences of the codewords at `places` (N,) of the page, or (N,) pages, at (lun, row)."""
    pages = zip(*(x.tolist() for x in np.broadcast_arrays(row, lun, places)), strict=True)
    seeds = np.array([scramble_seed(*page) for page in pages])
    result = np.zeros((len(seeds), RAW_BYTES), np.uint8)
    for bit, sequence in enumerate(_SEQUENCES):
        result ^= np.where((seeds >> bit & 1)[:, None].astype(bool), sequence, np.uint8(0))
    return result
