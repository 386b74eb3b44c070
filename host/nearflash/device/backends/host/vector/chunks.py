"""What the loops over rows of a bitmap matrix are made of: 32 elements at once, between addresses in memory.

LLVM makes one instruction of an expanding load where the processor has it (AVX-512 VBMI2), steps without it elsewhere.
Addresses are int64; what lies there must be checked before. `lanes` and `mask` are uint32, a bit an element.

Source: LLVM Language Reference (llvm.masked.expandload, llvm.masked.store).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from nearflash.abi.bitmap import CODEBOOK_ENTRIES, ESCAPE, ElementFormat
from nearflash.abi.formats import BF16, FP16

__all__ = ["ALL", "CHUNK", "decode_bf16", "decode_fp16", "expand8", "expand16", "load64", "popcount", "scale_bf16",
           "scale_fp16", "split4"]  # fmt: skip

CHUNK = 32
"""Elements of a call."""
ALL = np.uint32(0xFFFFFFFF)
"""Lanes of a full chunk."""
_BIT, _BYTE, _WORD, _LONG = (ir.IntType(bits) for bits in (1, 8, 16, 32))
_HALF, _FLOAT = ir.HalfType(), ir.FloatType()
_ADDRESS, _LANES = types.int64, types.uint32


def _vector(kind: Any, lanes: int = CHUNK) -> Any:
    return ir.VectorType(kind, lanes)


def _all(kind: Any, value: Any) -> Any:
    """A vector of one constant."""
    return ir.Constant(_vector(kind), [value] * CHUNK)


def _each(builder: Any, value: Any) -> Any:
    """A vector of one value."""
    single = builder.insert_element(ir.Constant(_vector(value.type), ir.Undefined), value, ir.Constant(_LONG, 0))
    return builder.shuffle_vector(single, single, ir.Constant(_vector(_LONG), [0] * CHUNK))


def _load(builder: Any, address: Any, kind: Any) -> Any:
    found = builder.load(builder.inttoptr(address, kind.as_pointer()))
    found.align = 1
    return found


def _intrinsic(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    """Call an intrinsic of LLVM by its full name, for kinds that llvmlite has no suffix for."""
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(result, [each.type for each in arguments]), name)
    return builder.call(function, arguments)


def _expanded(builder: Any, address: Any, mask: Any, bits: int) -> Any:
    """Values that follow one another in memory, each in the lane of its one of a mask; 0 elsewhere."""
    kind = ir.IntType(bits)
    arguments = [builder.inttoptr(address, kind.as_pointer()), mask, _all(kind, 0)]
    return _intrinsic(builder, f"llvm.masked.expandload.v{CHUNK}i{bits}", _vector(kind), arguments)


def _store(builder: Any, value: Any, address: Any, lanes: Any) -> None:
    pointer = builder.inttoptr(address, value.type.as_pointer())
    arguments = [value, pointer, ir.Constant(_LONG, 1), builder.bitcast(lanes, _vector(_BIT))]
    bits = value.type.element.width
    _intrinsic(builder, f"llvm.masked.store.v{CHUNK}i{bits}.p0", ir.VoidType(), arguments)


def _steps(generate: Callable[..., None], signature: Any) -> Any:
    """What an intrinsic returns for steps that have no result."""

    def run(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        generate(builder, *arguments)
        return context.get_dummy_value()

    return signature, run


@intrinsic  # type: ignore[untyped-decorator]
def load64(_: Any, address: Any) -> Any:
    """uint64 at an address."""
    return types.uint64(_ADDRESS), lambda _, builder, signature, given: _load(builder, given[0], ir.IntType(64))


@intrinsic  # type: ignore[untyped-decorator]
def popcount(_: Any, word: Any) -> Any:
    """int64: ones of a uint64."""

    def generate(_: Any, builder: Any, signature: Any, given: Any) -> Any:
        return _intrinsic(builder, "llvm.ctpop.i64", given[0].type, list(given))

    return types.int64(types.uint64), generate


def _expand(bits: int) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def expand(_: Any, out: Any, values: Any, mask: Any, lanes: Any) -> Any:
        """Values, each where the mask has a one, and zeros; only `lanes` are written."""

        def generate(builder: Any, out: Any, values: Any, mask: Any, lanes: Any) -> None:
            found = _expanded(builder, values, builder.bitcast(mask, _vector(_BIT)), bits)
            _store(builder, found, out, lanes)

        return _steps(generate, types.void(_ADDRESS, _ADDRESS, _LANES, _LANES))

    return expand


expand8, expand16 = _expand(8), _expand(16)


def _fields(builder: Any, address: Any, bits: int) -> Any:
    """Fields of so many bits, 32 of them, as words."""
    each = 8 // bits
    packed = _load(builder, address, _vector(_BYTE, CHUNK // each))
    repeated = builder.shuffle_vector(
        packed, packed, ir.Constant(_vector(_LONG), [lane // each for lane in range(CHUNK)])
    )
    shifts = ir.Constant(_vector(_WORD), [lane % each * bits for lane in range(CHUNK)])
    shifted = builder.lshr(builder.zext(repeated, _vector(_WORD)), shifts)
    return builder.and_(shifted, _all(_WORD, (1 << bits) - 1))


@intrinsic  # type: ignore[untyped-decorator]
def split4(_: Any, out: Any, fields: Any) -> Any:
    """32 fields of 4 bits as bytes."""

    def generate(builder: Any, out: Any, fields: Any) -> None:
        found = builder.trunc(_fields(builder, fields, 4), _vector(_BYTE))
        builder.store(found, builder.inttoptr(out, found.type.as_pointer())).align = 1

    return _steps(generate, types.void(_ADDRESS, _ADDRESS))


def _decode(number: Any, code_bits: int) -> Any:
    def generate(_: Any, builder: Any, signature: Any, given: Any) -> Any:
        out, book, high, codes, low, escapes, lanes = given
        fields = _fields(builder, codes, code_bits)
        code = builder.and_(fields, _all(_WORD, ESCAPE))
        escaped = builder.icmp_unsigned("==", code, _all(_WORD, ESCAPE))
        escaped = builder.and_(escaped, builder.bitcast(lanes, _vector(_BIT)))
        exponent = builder.zext(_expanded(builder, escapes, escaped, 8), _vector(_WORD))
        for entry in range(CODEBOOK_ENTRIES):
            found = _load(builder, builder.add(book, ir.Constant(book.type, entry)), _BYTE)
            wanted = builder.icmp_unsigned("==", code, _all(_WORD, entry))
            exponent = builder.select(wanted, _each(builder, builder.zext(found, _WORD)), exponent)
        exponent = builder.and_(exponent, _all(_WORD, (1 << number.exponent_bits) - 1))
        upper = builder.zext(_load(builder, high, _vector(_BYTE)), _vector(_WORD))
        significand = builder.and_(upper, _all(_WORD, 127))
        if number is FP16:
            bits = builder.zext(builder.bitcast(_load(builder, low, _LONG), _vector(_BIT)), _vector(_WORD))
            middle = builder.shl(builder.lshr(fields, _all(_WORD, 2)), _all(_WORD, 1))
            significand = builder.or_(builder.shl(significand, _all(_WORD, 3)), builder.or_(middle, bits))
        sign = builder.shl(builder.lshr(upper, _all(_WORD, 7)), _all(_WORD, 15))
        exponent = builder.shl(exponent, _all(_WORD, number.mantissa_bits))
        value = builder.or_(sign, builder.or_(exponent, significand))
        builder.store(value, builder.inttoptr(out, value.type.as_pointer())).align = 1
        taken = _intrinsic(builder, "llvm.ctpop.i32", _LONG, [builder.bitcast(escaped, _LONG)])
        return builder.zext(taken, ir.IntType(64))

    @intrinsic  # type: ignore[untyped-decorator]
    def decode(_: Any, out: Any, book: Any, high: Any, codes: Any, low: Any, escapes: Any, lanes: Any) -> Any:
        """32 coded values as words; returns how many of `lanes` took an escape. `low` counts for fp16 only."""
        return types.int64(*[_ADDRESS] * 6, _LANES), generate

    return decode


decode_fp16, decode_bf16 = _decode(FP16, 4), _decode(BF16, 2)


def _scale(output: ElementFormat) -> Any:
    narrow, canonical = _NARROW[output], output.number_format.canonical_nan

    def wide(builder: Any, pattern: Any) -> Any:
        if output is ElementFormat.FP16:
            return builder.fpext(builder.bitcast(pattern, _HALF), _FLOAT)
        return builder.bitcast(builder.shl(builder.zext(pattern, _LONG), ir.Constant(_LONG, 16)), _FLOAT)

    def generate(builder: Any, out: Any, codes: Any, mask: Any, lanes: Any, pair: Any) -> None:
        present = builder.bitcast(mask, _vector(_BIT))
        scale, minimum = (
            _each(builder, wide(builder, _load(builder, builder.add(pair, ir.Constant(pair.type, at)), _WORD)))
            for at in (0, 2)
        )
        steps = builder.uitofp(_expanded(builder, codes, present, 8), _vector(_FLOAT))
        total = builder.fadd(builder.fmul(steps, scale), minimum)
        unordered = builder.fcmp_unordered("uno", total, total)
        value = builder.select(unordered, _all(_WORD, canonical), narrow(builder, total))
        _store(builder, builder.select(present, value, _all(_WORD, 0)), out, lanes)

    @intrinsic  # type: ignore[untyped-decorator]
    def scaled(_: Any, out: Any, codes: Any, mask: Any, lanes: Any, pair: Any) -> Any:
        """Codes, bytes, as code · scale + minimum (at `pair`), each where the mask has a one, and zeros."""
        return _steps(generate, types.void(_ADDRESS, _ADDRESS, _LANES, _LANES, _ADDRESS))

    return scaled


def _to_fp16(builder: Any, value: Any) -> Any:
    return builder.bitcast(builder.fptrunc(value, _vector(_HALF)), _vector(_WORD))


def _to_bf16(builder: Any, value: Any) -> Any:
    """Nearest even; not for a NaN."""
    word = builder.bitcast(value, _vector(_LONG))
    odd = builder.and_(builder.lshr(word, _all(_LONG, 16)), _all(_LONG, 1))
    rounded = builder.lshr(builder.add(builder.add(word, odd), _all(_LONG, 0x7FFF)), _all(_LONG, 16))
    return builder.trunc(rounded, _vector(_WORD))


_NARROW = {ElementFormat.FP16: _to_fp16, ElementFormat.BF16: _to_bf16}
scale_fp16, scale_bf16 = _scale(ElementFormat.FP16), _scale(ElementFormat.BF16)
