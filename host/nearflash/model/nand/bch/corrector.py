"""Correction: syndromes, key equation (Berlekamp-Massey without inversion), roots of the locator polynomial.

All codewords of an array at once, column by column.
"""

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.codeword import BCH_ERRORS, MESSAGE_BYTES, PARITY_BYTES
from nearflash.model.nand.bch.encoder import parity
from nearflash.model.nand.bch.field import FieldElements, multiply, power

__all__ = ["UNCORRECTABLE", "correct"]

UNCORRECTABLE = -1
"""In place of a number of corrected bits."""
_BITS = 8 * (MESSAGE_BYTES + PARITY_BYTES)


def correct(codewords: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Message and parity (N, 550) without bit errors, and how many each had (0 to 16, or UNCORRECTABLE).

    An uncorrectable codeword is returned as it came.
    """
    remainder = parity(codewords[:, :MESSAGE_BYTES]) ^ codewords[:, MESSAGE_BYTES:]
    corrected, errors = codewords.copy(), np.zeros(len(codewords), np.int64)
    for dirty in np.array_split(np.flatnonzero(remainder.any(axis=1)), len(codewords) // 256 + 1):
        locator, degree = _key_equation(_syndromes(remainder[dirty]))
        flips = _roots(locator)
        good = flips.sum(axis=1) == degree
        corrected[dirty[good]] ^= np.packbits(flips[good], axis=1, bitorder="little")
        errors[dirty] = np.where(good, degree, UNCORRECTABLE)
    return corrected, errors


def _syndromes(remainder: NDArray[np.uint8]) -> FieldElements:
    """(N, 33): the remainder's values at alpha^1 to alpha^32, in columns 1 to 32."""
    bits = np.unpackbits(remainder, axis=1, bitorder="little").astype(np.int32)
    exponents = np.arange(8 * PARITY_BYTES - 1, -1, -1)[:, None] * np.arange(2 * BCH_ERRORS + 1)
    values: FieldElements = np.bitwise_xor.reduce(bits[:, :, None] * power(exponents), axis=1)
    return values


def _key_equation(syndromes: FieldElements) -> tuple[FieldElements, NDArray[np.int64]]:
    """Locator polynomials (N, 17), lowest coefficient first, and their lengths.

    Only odd syndromes are looked at: in a binary code every second discrepancy is zero.
    """
    count, terms = len(syndromes), BCH_ERRORS + 1
    locator, previous = np.zeros((2, count, terms), np.int32)
    locator[:, 0] = previous[:, 1] = 1  # `previous` comes multiplied by x
    scale, length = np.ones(count, np.int32), np.zeros(count, np.int64)
    for step in range(BCH_ERRORS):
        odd = 2 * step + 1
        discrepancy = np.zeros(count, np.int32)
        for k in range(min(odd, terms)):
            discrepancy ^= multiply(locator[:, k], syndromes[:, odd - k])
        new = multiply(scale[:, None], locator) ^ multiply(discrepancy[:, None], previous)
        grows = (discrepancy != 0) & (length <= step)
        previous = np.roll(np.where(grows[:, None], locator, previous), 2, axis=1)
        previous[:, :2] = 0
        length = np.where(grows, odd - length, length)
        scale = np.where(grows, discrepancy, scale)
        locator = new
    return locator, length


def _roots(locator: FieldElements) -> NDArray[np.bool_]:
    """(N, bits of a codeword): where the locator says that a bit is wrong."""
    inverse_places = np.arange(_BITS) - (_BITS - 1)  # exponents: bit j is the coefficient of x^(_BITS - 1 - j)
    values = np.zeros((len(locator), _BITS), np.int32)
    for k in range(locator.shape[1]):
        values ^= multiply(locator[:, k, None], power(k * inverse_places)[None, :])
    roots: NDArray[np.bool_] = values == 0
    return roots
