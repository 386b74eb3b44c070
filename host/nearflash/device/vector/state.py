"""Narrow state formats on the host's vector units; equals nearflash.model.update.state to the bit.

mx8 works on values that are scaled by their block's power of two: dividing by a power of two is exact, and rounding an
fp32 number to three bits of mantissa is then a sum and a shift of its bits, as it is for bf16. Magnitudes below the
smallest normal one of the format are rounded as multiples of its smallest.
"""

from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.rules.state import (
    BLOCK_PARAMS,
    DITHER_BITS,
    MX8,
    TILE_PARAMS,
    StateFormat,
    dither_key,
    dither_pattern,
)

__all__ = ["F32", "VectorState"]

F32: TypeAlias = NDArray[np.float32]
U32: TypeAlias = NDArray[np.uint32]
Stored: TypeAlias = list[NDArray[Any]]

INFINITY = np.uint32(0x7F800000)
MAGNITUDE = np.uint32(0x7FFFFFFF)


@cache
def _pattern() -> NDArray[np.uint16]:
    return np.array([dither_pattern(place) for place in range(TILE_PARAMS)], np.uint16)


@cache
def _values(role: str) -> F32:
    """Magnitude, with sign, of each code at the scale 1 (s = 127); NaN for the code of NaN."""
    element, codes = MX8[role], np.arange(256)
    magnitude = codes & 0x7F if element.signed else codes
    fraction, field = magnitude & 7, magnitude >> element.MANTISSA_BITS
    values = np.ldexp(fraction + np.where(field, 8.0, 0.0), np.maximum(field, 1) - 3 - element.top)
    if element.signed:
        values[128:] *= -1
    values[element.not_a_number] = np.nan
    return np.asarray(values, np.float32)


class VectorState:
    """Decodes and encodes blocks of at most `params` parameters of one array ("m" or "v") of one step."""

    def __init__(self, role: str, state_format: StateFormat, step: int, params: int) -> None:
        self._role, self._format, self._step = role, state_format, step
        self._words = np.empty((3, 0 if state_format is StateFormat.FP32 else params), np.uint32)

    def decode(self, stored: Stored, out: F32) -> F32:
        """fp32 values (n,) of stored arrays: the elements (n,), and of mx8 the scales (n / 32,). May return a view."""
        if self._format is StateFormat.FP32:
            values: F32 = stored[0]
            return values
        if self._format is StateFormat.BF16:
            word = out.view(np.uint32)
            np.copyto(word, stored[0])
            np.left_shift(word, 16, out=word)
            return out
        codes, scales = stored
        np.take(_values(self._role), codes, out=out, mode="clip")
        exponents = np.maximum(scales, MX8[self._role].least_scale).astype(np.int32) - 127
        blocks = out.reshape(-1, BLOCK_PARAMS)
        np.multiply(blocks, np.ldexp(np.float32(1), exponents)[:, None], out=blocks)
        return out

    def encode(self, values: F32, first_param: int, out: Stored) -> None:
        """Store values (n,), the only NaN of which is the canonical one, of the parameters from `first_param` on."""
        if self._format is StateFormat.FP32:
            out[0][:] = values
            return
        dither, word, other = self._words[:, : values.size]
        self._dither(first_param, dither)
        bits = values.view(np.uint32)
        if self._format is StateFormat.BF16:
            np.add(bits, dither, out=word)
            np.right_shift(word, 16, out=word)
            np.copyto(out[0], word, casting="unsafe")
        else:
            self._encode_blocks(bits, dither, word, other, out)

    def _dither(self, first_param: int, out: U32) -> None:
        start = 0
        while start < out.size:
            tile, place = divmod(first_param + start, TILE_PARAMS)
            stop = min(start + TILE_PARAMS - place, out.size)
            key = np.uint16(dither_key(self._step, self._role, tile))
            out[start:stop] = _pattern()[place : place + stop - start] + key
            start = stop

    def _encode_blocks(self, bits: U32, dither: U32, word: U32, other: U32, out: Stored) -> None:
        element, (codes, scales) = MX8[self._role], out
        magnitude = np.bitwise_and(bits, MAGNITUDE, out=word)
        finite = None
        if magnitude.max() >= INFINITY:
            finite = magnitude < INFINITY
            magnitude *= finite
        largest = np.maximum.reduceat(magnitude, np.arange(0, bits.size, BLOCK_PARAMS)) >> np.uint32(23)
        scale = np.maximum(largest, element.least_scale).astype(np.int32)
        scales[:] = scale
        nonzero = magnitude != 0 if element.keeps_small else None
        # Relative to the block: 1 is the power of two of the scale.
        relative = magnitude.view(np.float32)
        blocks = relative.reshape(-1, BLOCK_PARAMS)
        np.multiply(blocks, np.ldexp(np.float32(1), 127 - scale)[:, None], out=blocks)
        # In 2^-16 of the format's smallest magnitude; past 16 of those the other way of rounding holds.
        scaled, small = other.view(np.float32), other.view(np.int32)
        np.minimum(relative, np.float32(2.0 ** (2 - element.top)), out=scaled)
        np.multiply(scaled, np.float32(2.0 ** (element.top + 2 + DITHER_BITS)), out=scaled)
        np.copyto(small, scaled, casting="unsafe")
        np.add(small, dither.view(np.int32), out=small)
        np.right_shift(small, DITHER_BITS, out=small)
        np.left_shift(dither, 20 - DITHER_BITS, out=dither)
        np.add(magnitude, dither, out=magnitude)
        np.right_shift(magnitude, 20, out=magnitude)
        code = magnitude.view(np.int32)
        np.subtract(code, 127 - element.top << element.MANTISSA_BITS, out=code)
        np.maximum(code, small, out=code)  # each is too small where the other holds
        if element.signed:
            np.negative(code, out=small)  # negative unless zero: a zero gets no sign
            np.bitwise_and(other, bits, out=other)
            np.right_shift(other, 24, out=other)
            np.bitwise_and(other, np.uint32(0x80), out=other)
            np.bitwise_or(magnitude, other, out=magnitude)
        np.copyto(codes, magnitude, casting="unsafe")
        if nonzero is not None:
            np.maximum(codes, nonzero.view(np.uint8), out=codes)
        if finite is not None:
            codes[~finite] = element.not_a_number
