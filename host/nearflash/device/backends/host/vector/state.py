"""Narrow state formats on the host's vectors; equals nearflash.model.update.state to the bit.

Element by element as the model has it, in integers, compiled; a scale's power of two is a factor, which is exact.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.formats import FP32
from nearflash.abi.optimizers.state import (
    BLOCK_PARAMS,
    DITHER_BITS,
    MX8,
    TILE_PARAMS,
    StateFormat,
    dither_key,
    dither_pattern,
)
from nearflash.device.backends.host.vector.compiled import bf16_number, compiled, pattern

__all__ = ["NO_SCALES", "VectorState", "decoder", "dithers", "encoder", "tile_keys"]

F32: TypeAlias = NDArray[np.float32]
Stored: TypeAlias = list[NDArray[Any]]

INT = np.int32
NO_SCALES = np.empty(0, np.uint8)
"""Those of elements that have none."""
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
        elements, scales = _parts(stored)
        decoder(self._role, self._format)(elements, scales, out)
        return out

    def encode(self, values: F32, first_param: int, out: Stored) -> None:
        """Store values (n,), the only NaN of which is the canonical one, of the parameters from `first_param` on."""
        if self._format is StateFormat.FP32:
            out[0][:] = values
            return
        elements, scales = _parts(out)
        start, place = 0, first_param % TILE_PARAMS
        for key in tile_keys(self._step, self._role, first_param, values.size):
            stop = min(start + TILE_PARAMS - place, values.size)
            blocks = slice(start // BLOCK_PARAMS, stop // BLOCK_PARAMS)
            encode = encoder(self._role, self._format)
            encode(values[start:stop], dithers()[place:][: stop - start], key, elements[start:stop], scales[blocks])
            start, place = stop, 0


def _parts(stored: Stored) -> tuple[NDArray[Any], NDArray[Any]]:
    """Elements and scales."""
    return stored[0], stored[1] if len(stored) > 1 else NO_SCALES


def tile_keys(step: int, role: str, first_param: int, params: int) -> NDArray[np.int32]:
    """Keys of the tiles in which the parameters from `first_param` on lie, the first one perhaps in part."""
    tiles = range(first_param // TILE_PARAMS, -(-(first_param + params) // TILE_PARAMS))
    return np.array([dither_key(step, role, tile) for tile in tiles], INT)


@cache
def dithers() -> NDArray[np.int32]:
    """What a tile's parameters add to the tile's key, (TILE_PARAMS,)."""
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


@cache
def decoder(role: str, state_format: StateFormat) -> Callable[..., None]:
    """Compiled: fp32 numbers of elements and scales, into the last argument."""
    return _widen if state_format is StateFormat.BF16 else _block_decoder(role)


@cache
def encoder(role: str, state_format: StateFormat) -> Callable[..., None]:
    """Compiled: of fp32 numbers in one tile, of their dithers, and of the tile's key, into elements and scales."""
    return _narrow if state_format is StateFormat.BF16 else _block_encoder(role)


@compiled
def _widen(patterns: Any, _: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = bf16_number(patterns[i])


@compiled
def _narrow(values: Any, dithers: Any, key: Any, out: Any, _: Any) -> None:
    for i in range(values.size):
        dither = INT(INT(dithers[i] + key) & DITHER)
        out[i] = np.uint16(INT(pattern(values[i]) + dither) >> SHIFT)


@cache
def _block_decoder(role: str) -> Callable[..., None]:
    table, scales = _values(role), np.maximum(np.arange(256), MX8[role].least_scale)
    with np.errstate(over="ignore"):  # of a scale that no encoder makes
        powers = np.ldexp(np.float32(1), scales - 127)

    def loop(elements: Any, scales: Any, values: Any) -> None:
        codes, out = elements.reshape(-1, BLOCK_PARAMS), values.reshape(-1, BLOCK_PARAMS)
        for block in range(scales.size):
            power = powers[scales[block]]
            for i in range(BLOCK_PARAMS):
                out[block, i] = table[codes[block, i]] * power

    return compiled(loop)


@cache
def _block_encoder(role: str) -> Callable[..., None]:
    element = MX8[role]
    top, least, not_a_number = INT(element.top), INT(element.least_scale), INT(element.not_a_number)
    signed, keeps_small, most = element.signed, element.keeps_small, INT(31)

    def loop(numbers: Any, added: Any, key: Any, elements: Any, scales: Any) -> None:
        values, dithers = numbers.reshape(-1, BLOCK_PARAMS), added.reshape(-1, BLOCK_PARAMS)
        codes = elements.reshape(-1, BLOCK_PARAMS)
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
