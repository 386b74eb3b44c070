"""GF(2^13): elements are integers, bit k the coefficient of alpha^k."""

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.codeword import BCH_BITS, BCH_POLYNOMIAL

__all__ = ["ORDER", "FieldElements", "multiply", "power"]

FieldElements = NDArray[np.int32]

ORDER = (1 << BCH_BITS) - 1
"""Of alpha."""


def _powers() -> FieldElements:
    powers = np.empty(ORDER, np.int32)
    element = 1
    for exponent in range(ORDER):
        powers[exponent] = element
        element = element << 1 ^ (element >> (BCH_BITS - 1)) * BCH_POLYNOMIAL
    return powers


_POWERS = _powers()
_LOGARITHMS = np.zeros(ORDER + 1, np.int32)
_LOGARITHMS[_POWERS] = np.arange(ORDER)


def power(exponents: NDArray[np.integer]) -> FieldElements:
    """alpha to the `exponents`, negative ones too."""
    powers: FieldElements = _POWERS[exponents % ORDER]
    return powers


def multiply(a: FieldElements, b: FieldElements) -> FieldElements:
    """Product, element by element."""
    product: FieldElements = _POWERS[(_LOGARITHMS[a] + _LOGARITHMS[b]) % ORDER]
    product[(a == 0) | (b == 0)] = 0
    return product
