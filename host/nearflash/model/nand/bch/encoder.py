"""Parity of messages: the remainder of their division by the generator, byte by byte."""

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.codeword import BCH_BITS, BCH_ERRORS, BCH_POLYNOMIAL, PARITY_BYTES

__all__ = ["generator", "parity"]


def _times(a: int, b: int) -> int:
    """Product of polynomials over GF(2)."""
    product = 0
    for bit in range(b.bit_length()):
        product ^= (b >> bit & 1) * (a << bit)
    return product


def _modulo(a: int, b: int) -> int:
    while a.bit_length() >= b.bit_length():
        a ^= b << (a.bit_length() - b.bit_length())
    return a


def _minimal_polynomial(exponent: int) -> int:
    """Minimal polynomial of alpha^exponent, of degree 13: the product of (x - conjugate)."""
    root = 1
    for _ in range(exponent):
        root = _modulo(root << 1, BCH_POLYNOMIAL)
    coefficients = [1]  # of the product so far, in the field, lowest first
    for _ in range(BCH_BITS):
        shifted = [0, *coefficients]
        scaled = [_modulo(_times(root, c), BCH_POLYNOMIAL) for c in coefficients] + [0]
        coefficients = [a ^ b for a, b in zip(shifted, scaled, strict=True)]
        root = _modulo(_times(root, root), BCH_POLYNOMIAL)
    return sum(c << k for k, c in enumerate(coefficients))


def generator() -> int:
    """g(x), bit k the coefficient of x^k: the product of the minimal polynomials of alpha, alpha^3, …, alpha^31."""
    product = 1
    for exponent in range(1, 2 * BCH_ERRORS, 2):
        product = _times(product, _minimal_polynomial(exponent))
    return product


def _table() -> NDArray[np.uint8]:
    """(256, PARITY_BYTES): remainder of each byte (bit 0 first, so the highest power) times x^208."""
    g = generator()
    rows = []
    for byte in range(256):
        leading = int(f"{byte:08b}"[::-1], 2) << 8 * PARITY_BYTES
        rows.append([int(b) for b in f"{_modulo(leading, g):0{8 * PARITY_BYTES}b}"])
    return np.packbits(np.array(rows, np.uint8), axis=1, bitorder="little")


_TABLE = _table()


def parity(messages: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(N, PARITY_BYTES) of messages (N, n): message and parity together are multiples of g."""
    count, length = messages.shape
    work = np.zeros((length + PARITY_BYTES, count), np.uint8)
    work[:length] = messages.T
    for place in range(length):
        work[place + 1 : place + 1 + PARITY_BYTES] ^= _TABLE.T[:, work[place]]
    return np.ascontiguousarray(work[length:].T)
