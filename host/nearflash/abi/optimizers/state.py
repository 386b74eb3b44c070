"""How the state is stored: formats of m and v, the block-wise 8-bit elements, the dither of their rounding, the master.

`mx8`: 32 neighbouring parameters share a scale byte s: the fp32 exponent field of their largest finite magnitude, or
the element's `least_scale` where that is more. A code of exponent field e and mantissa f has the magnitude
(8 + f)·2^(e - 3 - top)·2^(s - 127), or f·2^(1 - 3 - top)·2^(s - 127) where e is 0. `top` is the exponent field of
magnitudes in [1, 2)·2^(s - 127), one less than the largest, so that rounding up stays within the format. From
`least_scale` on every element is zero or a normal fp32 number.

Dither: a 16-bit number that is added below the last bit that stays, before the rest is cut off. In tiles of 8,192
parameters of the flat vector it is PATTERN(place in the tile) + KEY(step, array, tile) mod 2^16: over the steps it is
uniform for each parameter, over a tile it is equally spaced, so that the errors of a tile nearly cancel.

`split`: beside bf16 weights the fp32 master need not be stored as a whole. Its upper half is the weight, rounded to
nearest with ties away from zero, weight = (p + 0x8000) >> 16, and its lower half is the rest, so that
p = (weight << 16) + (rest as a signed number) mod 2^32: exact, also where the weight rounds to infinity. (Ties to even
have no such inverse: 0x00008000 and 0x00018000 lie as far from 0x00010000, with the same rest.) A NaN keeps its bits
where its lower half is zero; any other becomes the canonical one.

Source: Open Compute Project, Microscaling Formats 1.0 (the scale and the elements' shape); docs/contracts/numerics.md.
"""

from dataclasses import dataclass

from nearflash.abi.formats import BF16, FP32
from nearflash.abi.python310 import StrEnum

__all__ = [
    "BLOCK_PARAMS",
    "DITHER_BITS",
    "HALVES",
    "MIX_SHIFTS",
    "MX8",
    "ROLES",
    "TILE_PARAMS",
    "BlockElement",
    "MasterFormat",
    "StateFormat",
    "dither_key",
    "dither_pattern",
]

BLOCK_PARAMS = 32
"""Parameters that share a scale in state format mx8."""
TILE_PARAMS = 8192
"""Parameters that share a key of the dither."""
DITHER_BITS = 16

_WORD = 0xFFFF_FFFF
MIX_SHIFTS = ((10, 7), (5, 13), (15, 16)) * 2
"""Rounds of the mixer of keys: bits that a word is shifted up for a sum, then down for an exclusive or."""
ROLES = {"m": 0, "v": 1}
"""Numbers of the arrays in the key."""


class StateFormat(StrEnum):
    """How m and v are stored."""

    FP32 = "fp32"
    BF16 = "bf16"
    """Rounded with a dither."""
    MX8 = "mx8"
    """One byte an element and one byte a block of 32 for the block's power of two, rounded with a dither."""

    @property
    def code(self) -> int:
        """Value of the register field `state_format`."""
        return tuple(StateFormat).index(self)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of m or v."""
        return {StateFormat.FP32: 4, StateFormat.BF16: 2, StateFormat.MX8: 1}[self]

    @property
    def block_params(self) -> int:
        """A command covers whole blocks of so many parameters of the flat vector."""
        return BLOCK_PARAMS if self is StateFormat.MX8 else 1

    def array_bytes(self, array: str, params: int) -> int:
        """Bytes of `params` parameters' part of an array: p, weight, rest, m, v, m_scale or v_scale."""
        if array.endswith("_scale"):
            return -(-params // BLOCK_PARAMS)
        if array in HALVES:
            return params * BF16.bytes
        return params * (FP32.bytes if array == "p" else self.element_bytes)


class MasterFormat(StrEnum):
    """How p, the fp32 master of the parameters, is stored."""

    FP32 = "fp32"
    SPLIT = "split"
    """Two arrays of 16 bits, HALVES, in the place of p."""

    @property
    def arrays(self) -> tuple[str, ...]:
        """The arrays that hold p."""
        return HALVES if self is MasterFormat.SPLIT else ("p",)


HALVES = ("weight", "rest")
"""Arrays of a split master: bf16 weights, and what p has beside them."""


@dataclass(frozen=True)
class BlockElement:
    """One byte of a block: the code is [sign,] exponent field, three bits of mantissa."""

    exponent_bits: int
    signed: bool
    not_a_number: int
    """The one code of infinities and NaN."""
    keeps_small: bool
    """A magnitude that is not zero never becomes zero: it is stored as the smallest one at least."""

    MANTISSA_BITS = 3

    @property
    def top(self) -> int:
        """Exponent field of the block's largest magnitude."""
        return (1 << self.exponent_bits) - 2

    @property
    def least_scale(self) -> int:
        """Smallest scale byte that has a meaning of its own; smaller ones mean it."""
        return self.top + self.MANTISSA_BITS


MX8 = {"m": BlockElement(4, True, 0x7F, False), "v": BlockElement(5, False, 0xFF, True)}
"""m: sign, 4 and 3 bits. v: no sign, 5 and 3 bits, as v spans the square of m's range; were a small v zero, the
parameter's next step would be m/eps."""


def dither_pattern(place: int) -> int:
    """Place in the tile, 13 bits -> 16 bits: linear over GF(2); the 8,192 results differ in their upper 13 bits."""
    place ^= place << 6 & 0xFFFF
    place ^= place >> 5
    return place ^ (place << 9 & 0xFFFF)


def dither_key(step: int, role: str, tile: int) -> int:
    """16 bits that look random, for array `role` ("m" or "v") of tile `tile` of the flat vector at step `step`."""
    return _mix(_mix(2 * step + ROLES[role]) + tile) >> 32 - DITHER_BITS


def _mix(word: int) -> int:
    """A permutation of 32-bit words from sums and shifts, which gateware has without multipliers."""
    for up, down in MIX_SHIFTS:
        word = word + (word << up) & _WORD
        word ^= word >> down
    return word
