"""fp32 to fp16 and bf16, and back."""

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.formats import BF16, FP16, FP32, NumberFormat
from nearflash.model.fp.bits import Bits, Flags, canonical, exceptions, tiny_below

__all__ = ["from_narrow", "to_bf16", "to_fp16", "to_narrow"]


def to_fp16(value: NDArray[np.float32]) -> NDArray[np.uint16]:
    """fp16 bit patterns of fp32 values, rounded to nearest even; subnormals are kept, a NaN becomes the canonical."""
    with np.errstate(all="ignore"):
        bits = value.astype(np.float16).view(np.uint16)
    return np.where(np.isnan(value), np.uint16(FP16.canonical_nan), bits)


def to_bf16(value: NDArray[np.float32]) -> NDArray[np.uint16]:
    """bf16 bit patterns of fp32 values, rounded to nearest even; subnormals are kept, a NaN becomes the canonical."""
    bits = value.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)))) >> np.uint32(16)
    return np.where(np.isnan(value), np.uint16(BF16.canonical_nan), rounded.astype(np.uint16))


def from_narrow(bits: NDArray[np.uint16], number: NumberFormat) -> Bits:
    """fp32 bit patterns of fp16 or bf16 ones; exact."""
    if number == FP16:
        return canonical(bits.view(np.float16).astype(np.float32))
    return canonical((bits.astype(np.uint32) << np.uint32(FP32.bits - BF16.bits)).view(np.float32))


def to_narrow(bits: Bits, number: NumberFormat) -> tuple[NDArray[np.uint16], Flags]:
    """fp16 or bf16 bit patterns of fp32 ones, and the exceptions."""
    value = bits.view(np.float32)
    narrow = to_fp16(value) if number == FP16 else to_bf16(value)
    back = from_narrow(narrow, number).view(np.float32)
    with np.errstate(all="ignore"):
        return narrow, exceptions((bits,), back, inexact=back != value, tiny=np.abs(value) < tiny_below(number))
