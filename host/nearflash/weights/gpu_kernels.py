"""Rows of bitmap matrices expanded on a GPU, in Triton; under its interpreter (TRITON_INTERPRET=1) on the CPU, too.

A program takes a row, tile after tile: a prefix sum over the tile's bits gives each element's place among the values,
and the sum of all is carried on. Neighbouring elements so read neighbouring values, and nothing is read twice.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearflash.abi.bitmap import CODEBOOK_ENTRIES, ESCAPE, SCALE_COLUMNS, BitmapHeader, ElementFormat, RowFormat
from nearflash.abi.errors import FormatError, ShapeError

__all__ = ["expand_rows", "make_target", "section_bytes"]

_TILE = 2048
"""Columns of a tile, at most."""
_PLAIN16, _PLAIN8, _CODED_FP16, _CODED_BF16, _SCALED8, _SCALED4 = (tl.constexpr(int(form)) for form in RowFormat)
_ENTRIES, _ESCAPE, _SCALED = tl.constexpr(CODEBOOK_ENTRIES), tl.constexpr(ESCAPE), tl.constexpr(SCALE_COLUMNS)
_NAN_FP16, _NAN_BF16 = (
    tl.constexpr(element.number_format.canonical_nan) for element in (ElementFormat.FP16, ElementFormat.BF16)
)
assert CODEBOOK_ENTRIES == 3
_DTYPES = {ElementFormat.FP16: torch.float16, ElementFormat.BF16: torch.bfloat16, ElementFormat.INT8: torch.int8}


def expand_rows(stream: Tensor, starts: Tensor, header: BitmapHeader, out: Tensor | None = None) -> Tensor:
    """The dense matrix (rows, columns) of a stream, which must have been checked: lengths and checksums are believed.

    stream: uint8 (bytes,), at an even address. starts: int64 (rows, 4), of each row the offset of its bitmap, its
    values, its escapes and the offset of its group. out: of that shape and of float16, bfloat16 or int8, contiguous,
    written where given. All on one device. Raises ShapeError, FormatError for another `out`.
    """
    dtype = _DTYPES[header.dense]
    out = make_target((header.rows, header.columns), dtype, out, stream.device)
    tile = min(_TILE, triton.next_power_of_2(header.columns))
    _expand[(header.rows,)](
        stream, stream.view(torch.int16), out.view(torch.int8 if dtype == torch.int8 else torch.int16), starts,
        header.columns, FORM=int(header.row_format), BF16=header.dense is ElementFormat.BF16,
        TILE=tile, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def make_target(shape: tuple[int, ...], dtype: torch.dtype, out: Tensor | None, device: Any) -> Tensor:
    """`out`, or a tensor made for it on `device`. Raises ShapeError, FormatError."""
    if out is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if tuple(out.shape) != shape or not out.is_contiguous():
        raise ShapeError(f"out must be contiguous and have the shape {shape}, not {tuple(out.shape)}")
    if out.dtype != dtype:
        raise FormatError(f"out must be of {dtype}, not {out.dtype}")
    return out


@triton.jit
def section_bytes(bits):  # type: ignore[no-untyped-def]
    """Bytes of a section of so many bits."""
    return (bits + 511) // 512 * 64


@triton.jit
def _expand(  # type: ignore[no-untyped-def]
    bytes_at, words_at, out, starts, columns,
    FORM: tl.constexpr, BF16: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    start = tl.load(starts + row * 4)
    count, escaped = tl.load(starts + row * 4 + 1).to(tl.int32), tl.load(starts + row * 4 + 2).to(tl.int32)
    behind, target = start + section_bytes(columns), out + row.to(tl.int64) * columns
    book = bytes_at + tl.load(starts + row * 4 + 3)
    values, escapes = 0, 0
    for first in range(0, columns, TILE):
        column = first + tl.arange(0, TILE)
        inside = column < columns
        bitmap = tl.load(bytes_at + start + column // 8, mask=inside, other=0).to(tl.int32)
        bit = (bitmap >> column % 8) & 1
        present = bit == 1
        rank = values + tl.cumsum(bit, 0) - bit
        values += tl.sum(bit, 0)
        if FORM == _PLAIN16:
            words = tl.load(words_at + behind // 2 + rank, mask=present, other=0)
        elif FORM == _PLAIN8:
            words = tl.load(bytes_at + behind + rank, mask=present, other=0).to(tl.int8, bitcast=True)
        elif FORM == _SCALED8 or FORM == _SCALED4:  # noqa: SIM109 (Triton has no `in`)
            codes_at = behind + section_bytes((columns + _SCALED - 1) // _SCALED * 32)
            if FORM == _SCALED8:
                code = tl.load(bytes_at + codes_at + rank, mask=present, other=0).to(tl.int32)
            else:
                code = tl.load(bytes_at + codes_at + rank // 2, mask=present, other=0).to(tl.int32)
                code = (code >> rank % 2 * 4) & 15
            pair = words_at + behind // 2 + column // _SCALED * 2
            words = _scale(code, tl.load(pair, mask=inside, other=0), tl.load(pair + 1, mask=inside, other=0), BF16)
            words = tl.where(present, words, 0)
        else:
            bits: tl.constexpr = 4 if FORM == _CODED_FP16 else 2
            low_bytes = section_bytes(count) if FORM == _CODED_FP16 else 0
            codes_at = behind + low_bytes
            escapes_at = codes_at + section_bytes(count * bits)
            high_at = escapes_at + section_bytes(escaped * 8)
            field = tl.load(bytes_at + codes_at + rank * bits // 8, mask=present, other=0).to(tl.int32)
            field = (field >> rank * bits % 8) & ((1 << bits) - 1)
            code = field & 3
            free = (present & (code == _ESCAPE)).to(tl.int32)
            escape_at = escapes + tl.cumsum(free, 0) - free
            escapes += tl.sum(free, 0)
            exponent = tl.load(bytes_at + escapes_at + escape_at, mask=free == 1, other=0).to(tl.int32)
            for entry in tl.static_range(_ENTRIES):
                exponent = tl.where(code == entry, tl.load(book + entry).to(tl.int32), exponent)
            high = tl.load(bytes_at + high_at + rank, mask=present, other=0).to(tl.int32)
            if FORM == _CODED_FP16:
                low = tl.load(bytes_at + behind + rank // 8, mask=present, other=0).to(tl.int32)
                significand = (high & 127) << 3 | field >> 2 << 1 | (low >> rank % 8) & 1
                word = high >> 7 << 15 | (exponent & 31) << 10 | significand
            else:
                word = high >> 7 << 15 | exponent << 7 | high & 127
            words = tl.where(present, word, 0).to(tl.int16)
        tl.store(target + column, words, mask=inside)


@triton.jit
def _scale(code, scale, minimum, BF16: tl.constexpr):  # type: ignore[no-untyped-def]
    """int16 patterns of code · scale + minimum: product, sum and result rounded one after another."""
    if BF16:
        steps = (scale.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        total = code.to(tl.float32) * steps + (minimum.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        word = total.to(tl.int32, bitcast=True)
        narrow = ((word + ((word >> 16) & 1) + 0x7FFF) >> 16).to(tl.int16)
        return tl.where(total != total, tl.full(code.shape, _NAN_BF16, tl.int16), narrow)
    steps = scale.to(tl.float16, bitcast=True).to(tl.float32)
    total = code.to(tl.float32) * steps + minimum.to(tl.float16, bitcast=True).to(tl.float32)
    narrow = total.to(tl.float16).to(tl.int16, bitcast=True)
    return tl.where(total != total, tl.full(code.shape, _NAN_FP16, tl.int16), narrow)
