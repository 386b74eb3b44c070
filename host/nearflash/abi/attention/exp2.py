"""The table of `exp2`: 2^f · 1024 for 16 fraction bits, by 64 chords (docs/contracts/attention.md, 1, "exp2").

    significand(f) = (constant[f >> 10] + slope[f >> 10] · (f & 1023)) >> EXP2_FRACTION_BITS

The constants hold the half that rounds to nearest. All is computed in integers, so it is the same on every machine.
"""

from functools import cache
from math import isqrt

__all__ = ["EXP2_CONSTANT_BITS", "EXP2_FRACTION_BITS", "EXP2_SEGMENTS_LOG2", "EXP2_SLOPE_BITS", "exp2_table"]

EXP2_SEGMENTS_LOG2 = 6
EXP2_FRACTION_BITS = 18
"""Fraction bits of constants and slopes, in units of the significand (2^f · 1024)."""
EXP2_CONSTANT_BITS = 29
EXP2_SLOPE_BITS = 13
_CONSTANT_STEP = 1 << 10
"""Constants are multiples of this: of 2^-8 of the significand's unit."""
_STEPS = 1 << 16 - EXP2_SEGMENTS_LOG2
_GUARD_BITS = 64


def _power(half_segments: int) -> int:
    """2^(half_segments / 128) · 1024 in units of 2^-(EXP2_FRACTION_BITS + _GUARD_BITS), rounded down."""
    root = 1 << half_segments + (10 + EXP2_FRACTION_BITS + _GUARD_BITS << EXP2_SEGMENTS_LOG2 + 1)
    for _ in range(EXP2_SEGMENTS_LOG2 + 1):
        root = isqrt(root)  # the floor of a nested root is the nested floor
    return root


@cache
def exp2_table() -> tuple[tuple[int, int], ...]:
    """(constant, slope) of each segment.

    Each chord is lowered by half of its largest distance to the curve, which it has (nearly) in the middle.
    """
    table = []
    for segment in range(1 << EXP2_SEGMENTS_LOG2):
        start, middle, end = (_power(2 * segment + half) for half in range(3))
        slope = _round(end - start, _STEPS << _GUARD_BITS)
        too_high = (start + end) // 2 - middle
        # The line passes the lowered chord's middle, so that the error of the rounded slope is shared by both sides.
        constant = (start + end - too_high) // 2 - (slope * _STEPS // 2 << _GUARD_BITS)
        constant = _round(constant, _CONSTANT_STEP << _GUARD_BITS) * _CONSTANT_STEP
        table.append((constant + (1 << EXP2_FRACTION_BITS - 1), slope))
    return tuple(table)


def _round(value: int, unit: int) -> int:
    return (2 * value + unit) // (2 * unit)
