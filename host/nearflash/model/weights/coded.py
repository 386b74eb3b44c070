"""Values with coded exponents: the reference for the gateware's CodedValues.

A value is cut into planes: the code of its exponent, the exponent itself where the code is ESCAPE, and the other bits.
Of an exponent's byte only as many bits count as exponents of the format have. Patterns are uint16.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.bitmap import CODEBOOK_ENTRIES, ESCAPE, Section
from nearflash.abi.formats import BF16, NumberFormat

__all__ = ["codebook", "decode", "encode"]

Patterns = NDArray[Any]


def codebook(values: Patterns, number: NumberFormat) -> bytes:
    """The three most frequent exponents of values, the most frequent first; then the lower first, then zeros."""
    counts = np.bincount(_exponents(values, number), minlength=1 << number.exponent_bits)
    order = np.argsort(-counts, kind="stable")[:CODEBOOK_ENTRIES]
    return bytes(int(exponent) if counts[exponent] else 0 for exponent in order)


def encode(values: Patterns, book: bytes, number: NumberFormat) -> dict[Section, Patterns]:
    """Planes of values (n,), each plane an array of fields."""
    exponents = _exponents(values, number)
    code = np.full(values.size, ESCAPE, np.uint16)
    for entry in reversed(range(CODEBOOK_ENTRIES)):
        code[exponents == book[entry]] = entry
    escapes = {Section.ESCAPES: exponents[code == ESCAPE]}
    sign = values >> 15 << 7
    if number is BF16:
        return {Section.CODES: code, **escapes, Section.VALUES: sign | values & 127}
    codes = code | (values >> 1 & 3) << 2
    return {Section.LOW: values & 1, Section.CODES: codes, **escapes, Section.VALUES: sign | values >> 3 & 127}


def decode(planes: Mapping[Section, Patterns], book: bytes, number: NumberFormat) -> Patterns:
    """Values (n,) of planes as `encode` gives them."""
    fields, rest = (planes[section].astype(np.uint16) for section in (Section.CODES, Section.VALUES))
    code = fields & 3
    exponents = np.array([*book, 0], np.uint16)[code]
    exponents[code == ESCAPE] = planes[Section.ESCAPES]
    significand = rest & 127
    if number is not BF16:
        significand = significand << 3 | fields >> 2 << 1 | planes[Section.LOW]
    exponents &= (1 << number.exponent_bits) - 1
    values: Patterns = rest >> 7 << 15 | exponents << number.mantissa_bits | significand
    return values


def _exponents(values: Patterns, number: NumberFormat) -> Patterns:
    return values >> number.mantissa_bits & ((1 << number.exponent_bits) - 1)
