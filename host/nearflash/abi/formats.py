"""Number formats, each spelled once.

fp32, fp16: IEEE 754-2019 binary32 and binary16. bf16: binary32 cut to 8 significant bits. All arithmetic rounds to
nearest, ties to even; subnormals are kept; there is one NaN (`canonical_nan`).
"""

import struct
from dataclasses import dataclass

from nearflash.abi.errors import CommandError

__all__ = [
    "BF16",
    "FORMATS",
    "FP16",
    "FP32",
    "FP32_MIN_NORMAL",
    "INT4",
    "INT8",
    "NumberFormat",
    "fp32_bits",
    "fp32_round",
    "fp32_value",
]


@dataclass(frozen=True)
class NumberFormat:
    """A number format: widths in bits. Integers have no exponent bits."""

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int

    @property
    def bytes(self) -> int:
        """Size of one element, in whole bytes: none for int4, of which two share one."""
        return self.bits // 8

    @property
    def bias(self) -> int:
        """Exponent bias."""
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def canonical_nan(self) -> int:
        """Bit pattern of the one NaN: quiet, positive, empty payload."""
        return ((1 << (self.exponent_bits + 1)) - 1) << (self.mantissa_bits - 1)


FP32 = NumberFormat("fp32", 32, 8, 23)
FP16 = NumberFormat("fp16", 16, 5, 10)
BF16 = NumberFormat("bf16", 16, 8, 7)
INT8 = NumberFormat("int8", 8, 0, 7)
INT4 = NumberFormat("int4", 4, 0, 3)
FORMATS = {f.name: f for f in (FP32, FP16, BF16, INT8, INT4)}


FP32_MIN_NORMAL = 2.0**-126
"""Smallest positive normal fp32 number."""


def fp32_bits(value: float) -> int:
    """fp32 bit pattern of a double, rounded to nearest even. Raises CommandError past the fp32 range."""
    try:
        return int.from_bytes(struct.pack("<f", value), "little")
    except OverflowError:
        raise CommandError(f"a scalar must be within the fp32 range, not {value!r}") from None


def fp32_value(bits: int) -> float:
    """Double of an fp32 bit pattern (exact)."""
    return float(struct.unpack("<f", bits.to_bytes(4, "little"))[0])


def fp32_round(value: float) -> float:
    """The fp32 value nearest to a double, as a double."""
    return fp32_value(fp32_bits(value))
