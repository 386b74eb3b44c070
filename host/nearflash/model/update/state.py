"""Reference of the narrow state formats, and of the split master.

exp_avg and exp_avg_sq to bf16 or mx8 and back, with the dither of nearflash.abi.optimizers.state.

Written element by element in integers. Decoding is exact. Encoding adds the dither below the last bit that stays and
cuts: its mean over the steps is the value (of mx8: to 2^-16 of the smallest magnitude of the block's format).
"""

from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.optimizers.state import (
    BLOCK_PARAMS,
    DITHER_BITS,
    MX8,
    TILE_PARAMS,
    StateFormat,
    dither_key,
    dither_pattern,
)

__all__ = ["decode", "dither", "encode", "join_master", "split_master"]

F32: TypeAlias = NDArray[np.float32]
NAN = 0x7FC00000


def dither(role: str, step: int, first_param: int, params: int) -> NDArray[np.int64]:
    """Dither of `params` parameters from `first_param` on, (params,): 16 bits each."""
    tiles, places = np.divmod(np.arange(first_param, first_param + params), TILE_PARAMS)
    keys = {int(tile): dither_key(step, role, int(tile)) for tile in np.unique(tiles)}
    return _pattern()[places] + np.array([keys[tile] for tile in tiles.tolist()], np.int64) & 0xFFFF


@cache
def _pattern() -> NDArray[np.int64]:
    return np.array([dither_pattern(place) for place in range(TILE_PARAMS)], np.int64)


def encode(values: F32, role: str, state_format: StateFormat, dithers: NDArray[np.int64]) -> list[NDArray[Any]]:
    """Stored arrays of m or v, (n,): the elements, and of mx8 the scales, uint8, (n / 32,).

    A NaN of `values` must be the canonical one.
    """
    bits = values.view(np.uint32).astype(np.int64)
    if state_format is StateFormat.FP32:
        return [values]
    if state_format is StateFormat.BF16:
        return [(bits + dithers >> 16).astype(np.uint16)]
    element = MX8[role]
    field, fraction = bits >> 23 & 0xFF, bits & 0x7FFFFF
    finite = field < 0xFF
    blocks = np.where(finite, field, 0).reshape(-1, BLOCK_PARAMS)
    scales = np.maximum(blocks.max(axis=1), element.least_scale)
    # Exponent field of the element, before it is known whether there is one so small.
    exponent = np.maximum(field, 1) - np.repeat(scales, BLOCK_PARAMS) + element.top
    significand = fraction | np.where(field > 0, 1 << 23, 0)
    cut = 23 - element.MANTISSA_BITS + np.maximum(1 - exponent, 0)
    kept = (significand >> np.minimum(cut - DITHER_BITS, 63)) + dithers >> DITHER_BITS
    codes = (np.maximum(exponent, 1) - 1 << element.MANTISSA_BITS) + kept
    if element.keeps_small:
        codes = np.maximum(codes, significand > 0)
    if element.signed:
        codes |= np.where(codes > 0, bits >> 31 << 7, 0)
    codes = np.where(finite, codes, element.not_a_number)
    return [codes.astype(np.uint8), scales.astype(np.uint8)]


def decode(stored: list[NDArray[Any]], role: str, state_format: StateFormat) -> F32:
    """fp32 values of stored arrays, as `encode` returns them."""
    if state_format is StateFormat.FP32:
        return stored[0].view(np.float32)
    if state_format is StateFormat.BF16:
        return (stored[0].astype(np.uint32) << 16).view(np.float32)
    element = MX8[role]
    codes, scales = (array.astype(np.int64) for array in stored)
    magnitude = codes & 0x7F if element.signed else codes
    field, fraction = magnitude >> element.MANTISSA_BITS, magnitude & (1 << element.MANTISSA_BITS) - 1
    significand = fraction + np.where(field > 0, 1 << element.MANTISSA_BITS, 0)
    scale = np.maximum(np.repeat(scales, BLOCK_PARAMS), element.least_scale)
    exponent = np.maximum(field, 1) - element.MANTISSA_BITS - element.top + scale - 127
    with np.errstate(over="ignore"):
        values = np.ldexp(significand.astype(np.float64), exponent.astype(np.int32)).astype(np.float32)
    if element.signed:
        values = np.where(codes >> 7, -values, values)
    return np.where(codes == element.not_a_number, np.uint32(NAN).view(np.float32), values).astype(np.float32)


def split_master(words: NDArray[np.uint32]) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """The weight and the rest, (n,), of patterns of fp32 numbers, (n,)."""
    bits = words.astype(np.int64)
    bits = np.where((bits & 0x7FFFFFFF > 0x7F800000) & (bits & 0xFFFF > 0), NAN, bits)
    return (bits + 0x8000 >> 16 & 0xFFFF).astype(np.uint16), (bits & 0xFFFF).astype(np.uint16)


def join_master(weight: NDArray[np.uint16], rest: NDArray[np.uint16]) -> NDArray[np.uint32]:
    """Patterns of the fp32 numbers of which `split_master` made these."""
    low = rest.astype(np.int64)
    low -= low >> 15 << 16
    return ((weight.astype(np.int64) << 16) + low & 0xFFFFFFFF).astype(np.uint32)
