"""Narrow state formats on the host's vectors; equals nearflash.model.update.state to the bit.

Element by element as the model has it, in integers, compiled; a scale's power of two is a factor, which is exact.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.formats import FP32
from nearflash.abi.rules.state import (
    BLOCK_PARAMS,
    DITHER_BITS,
    MX8,
    TILE_PARAMS,
    StateFormat,
    dither_key,
    dither_pattern,
)
from nearflash.device.vector.compiled import bf16_number, compiled, pattern

__all__ = ["F32", "VectorState"]

F32: TypeAlias = NDArray[np.float32]
Stored: TypeAlias = list[NDArray[Any]]

INT = np.int32
ZERO, ONE, DITHER = INT(0), INT(1), INT((1 << DITHER_BITS) - 1)
FIELD, FIELDS, FRACTION, HIDDEN = INT(FP32.mantissa_bits), INT(0xFF), INT(0x7FFFFF), INT(0x800000)
MANTISSA, CUT, SHIFT, SIGN = INT(3), INT(FP32.mantissa_bits - 3 - DITHER_BITS), INT(DITHER_BITS), INT(0x80)


class VectorState:
    """Decodes and encodes one array ("m" or "v") of one step."""

    def __init__(self, role: str, state_format: StateFormat, step: int) -> None:
        self._role, self._format, self._step = role, state_format, step

    def decode(self, stored: Stored, out: F32) -> F32:
        """fp32 values (n,) of stored arrays: the elements (n,), and of mx8 the scales (n / 32,). May return a view."""
        if self._format is StateFormat.FP32:
            values: F32 = stored[0]
            return values
        if self._format is StateFormat.BF16:
            _widen(stored[0], out)
        else:
            scales = np.maximum(stored[1], MX8[self._role].least_scale)
            powers = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
            codes, blocks = (array.reshape(-1, BLOCK_PARAMS) for array in (stored[0], out))
            _decode_blocks(codes, powers, _values(self._role), blocks)
        return out

    def encode(self, values: F32, first_param: int, out: Stored) -> None:
        """Store values (n,), the only NaN of which is the canonical one, of the parameters from `first_param` on."""
        if self._format is StateFormat.FP32:
            out[0][:] = values
            return
        start = 0
        while start < values.size:  # a tile has one key
            tile, place = divmod(first_param + start, TILE_PARAMS)
            stop = min(start + TILE_PARAMS - place, values.size)
            dithers, key = _pattern()[place : place + stop - start], INT(dither_key(self._step, self._role, tile))
            if self._format is StateFormat.BF16:
                _narrow(values[start:stop], dithers, key, out[0][start:stop])
            else:
                scales = out[1][start // BLOCK_PARAMS : stop // BLOCK_PARAMS]
                arrays = values[start:stop], dithers, out[0][start:stop]
                _block_encoder(self._role)(*(array.reshape(-1, BLOCK_PARAMS) for array in arrays), key, scales)
            start = stop


@cache
def _pattern() -> NDArray[np.int32]:
    return np.array([dither_pattern(place) for place in range(TILE_PARAMS)], np.int32)


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


@compiled
def _widen(patterns: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = bf16_number(patterns[i])


@compiled
def _narrow(values: Any, dithers: Any, key: Any, out: Any) -> None:
    for i in range(values.size):
        dither = INT(INT(dithers[i] + key) & DITHER)
        out[i] = np.uint16(INT(pattern(values[i]) + dither) >> SHIFT)


@compiled
def _decode_blocks(codes: Any, powers: Any, table: Any, out: Any) -> None:
    for block in range(powers.size):
        for i in range(BLOCK_PARAMS):
            out[block, i] = table[codes[block, i]] * powers[block]


@cache
def _block_encoder(role: str) -> Callable[..., None]:
    """The loop for a role's element: over blocks of values, of their dithers and of the codes to be, (n, 32) each."""
    element = MX8[role]
    top, least, not_a_number = INT(element.top), INT(element.least_scale), INT(element.not_a_number)
    signed, keeps_small, most = element.signed, element.keeps_small, INT(31)

    def loop(values: Any, dithers: Any, codes: Any, key: Any, scales: Any) -> None:
        for block in range(scales.size):
            scale = least
            for i in range(BLOCK_PARAMS):
                field = INT(INT(pattern(values[block, i]) >> FIELD) & FIELDS)
                scale = max(scale, ZERO if field == FIELDS else field)
            scales[block] = np.uint8(scale)
            for i in range(BLOCK_PARAMS):
                bits = pattern(values[block, i])
                field = INT(INT(bits >> FIELD) & FIELDS)
                # The element's exponent field, before it is known whether there is one so small.
                exponent = INT(INT(max(field, ONE) - scale) + top)
                significand = INT(INT(bits & FRACTION) | (HIDDEN if field > ZERO else ZERO))
                cut = min(INT(CUT + max(INT(ONE - exponent), ZERO)), most)
                kept = INT(INT(INT(significand >> cut) + INT(INT(dithers[block, i] + key) & DITHER)) >> SHIFT)
                code = INT(INT(INT(max(exponent, ONE) - ONE) << MANTISSA) + kept)
                if keeps_small:
                    code = max(code, ONE if significand > ZERO else ZERO)
                if signed:
                    code = INT(code | (SIGN if (code > ZERO) & (bits < ZERO) else ZERO))
                codes[block, i] = np.uint8(not_a_number if field == FIELDS else code)

    return compiled(loop)
