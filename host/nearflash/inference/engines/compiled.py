"""What the compiled loops of attention are made of: numbers, places in arrays, rows of them.

numba makes machine code for the processor at hand; it holds no lock of Python's. Sums may be taken in any order, so
that vector units can; nothing else is left to the compiler. fp16 is seen as uint16. Inner loops take places in flat
arrays (`get`, `put`) and not slices: making a slice costs as much as 64 elements.

Source: 2^f as in the Cephes library (exp2f).
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

__all__ = [
    "LOG2E", "LOWEST", "ROWS", "add", "add_rows", "compiled", "dot", "dot_rows", "exp", "exponentials", "fetch", "fp16",
    "fp16_bits", "get", "largest_of", "put", "scale", "sum_of",
    "sum_of_exponentials", "widen",
]  # fmt: skip

LOG2E = np.float32(1.4426950408889634)
LOWEST = np.float32(-3.0e38)
"""A logit that is none."""
ROWS = 4
"""Rows that `add_rows` adds up."""
_DIGEST = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
_LANES = 32
"""Numbers that `largest_of` compares at once."""
_ORDERS = {"reassoc", "contract", "nsz", "arcp"}


@intrinsic
def fp16(_: Any, word: Any) -> Any:
    """fp32 number of fp16 bits."""

    def generate(_: Any, builder: Any, signature: Any, words: Any) -> Any:
        return builder.fpext(builder.bitcast(words[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


@intrinsic
def fp16_bits(_: Any, value: Any) -> Any:
    """fp16 bits of an fp32 number, rounded to nearest even."""

    def generate(_: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.bitcast(builder.fptrunc(values[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), generate


@intrinsic
def _float(_: Any, word: Any) -> Any:
    """fp32 number of an int32's bits."""
    return types.float32(types.int32), lambda _, builder, signature, words: builder.bitcast(words[0], ir.FloatType())


@intrinsic
def get(_: Any, array: Any, place: Any) -> Any:
    """Element of a flat array, which must be there: no negative places, as numba's own indexing has them."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        data = make_array(signature.args[0])(context, builder, values[0]).data
        return builder.load(builder.gep(data, [values[1]]))

    return array.dtype(array, types.intp), generate


@intrinsic
def put(_: Any, array: Any, place: Any, value: Any) -> Any:
    """Set an element of a flat array, which must be there."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        data = make_array(signature.args[0])(context, builder, values[0]).data
        builder.store(values[2], builder.gep(data, [values[1]]))
        return context.get_dummy_value()

    return types.none(array, types.intp, array.dtype), generate


@intrinsic
def fetch(_: Any, array: Any, place: Any) -> Any:
    """Ask for the cache line of an element of a flat array."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        data = make_array(signature.args[0])(context, builder, values[0]).data
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        fetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        address = builder.bitcast(builder.gep(data, [values[1]]), byte)
        builder.call(fetch, [address, word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.none(array, types.intp), generate


@intrinsic
def _floor(_: Any, value: Any) -> Any:
    """fp32 number, rounded down."""

    def generate(_: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType()])
        return builder.call(builder.module.declare_intrinsic("llvm.floor", [ir.FloatType()], kind), values)

    return types.float32(types.float32), generate


def compiled(function: Any) -> Any:
    """Decorator: machine code when first called, kept on disk while neither its own module nor this one changes."""
    made = njit(nogil=True, error_model="numpy", fastmath=_ORDERS, cache=True)(function)
    # numba compares the function's own file alone, but what is called from this one is a part of its code.
    kept = made._cache._cache_file
    kept._source_stamp = (*kept._source_stamp, _DIGEST)
    return made


@compiled
def exp(x: Any) -> Any:
    """e^x of x <= 0 in fp32, with a relative error below (2 + |x|)·2^-23; 0 from -87 down."""
    y = max(x, np.float32(-87.0)) * LOG2E
    n = _floor(np.float32(y + np.float32(0.5)))
    f = np.float32(y - n)
    p = np.float32(1.535336188319500e-4)
    p = p * f + np.float32(1.339887440266574e-3)
    p = p * f + np.float32(9.618437357674640e-3)
    p = p * f + np.float32(5.550332471162809e-2)
    p = p * f + np.float32(2.402264791363012e-1)
    p = p * f + np.float32(6.931472028550421e-1)
    p = p * f + np.float32(1.0)
    power = _float(np.int32(np.int32(n) + np.int32(127)) << np.int32(23))
    return p * power if x > np.float32(-87.0) else np.float32(0.0)


@compiled
def widen(values: Any, at: Any, wide: Any, to: Any, count: Any) -> None:
    """fp32 of fp16 values."""
    for i in range(count):
        put(wide, to + i, fp16(get(values, at + i)))


@compiled
def dot(x: Any, x_at: Any, y: Any, y_at: Any, count: Any) -> Any:
    """Scalar product."""
    total = np.float32(0.0)
    for i in range(count):
        total += get(x, x_at + i) * get(y, y_at + i)
    return total


@compiled
def dot_rows(x: Any, x_at: Any, y: Any, y_at: Any, stride: Any, count: Any) -> Any:
    """Scalar products of x with four rows of y."""
    a, b, c, d = np.float32(0.0), np.float32(0.0), np.float32(0.0), np.float32(0.0)
    for i in range(count):
        factor, place = get(x, x_at + i), y_at + i
        a += factor * get(y, place)
        b += factor * get(y, place + stride)
        c += factor * get(y, place + 2 * stride)
        d += factor * get(y, place + 3 * stride)
    return a, b, c, d


@compiled
def add(weight: Any, x: Any, x_at: Any, y: Any, y_at: Any, count: Any) -> None:
    """y += weight·x."""
    for i in range(count):
        put(y, y_at + i, get(y, y_at + i) + weight * get(x, x_at + i))


@compiled
def add_rows(weights: Any, first: Any, x: Any, x_at: Any, stride: Any, y: Any, y_at: Any, count: Any) -> None:
    """y += the sum of four rows of x by four weights."""
    a, b, c, d = (
        get(weights, first), get(weights, first + 1), get(weights, first + 2), get(weights, first + 3)
    )  # fmt: skip
    for i in range(count):
        place = x_at + i
        two = a * get(x, place) + b * get(x, place + stride)
        more = c * get(x, place + 2 * stride) + d * get(x, place + 3 * stride)
        put(y, y_at + i, get(y, y_at + i) + two + more)


@compiled
def largest_of(x: Any, lower: Any) -> Any:
    """The largest element, `lower` at least."""
    most, whole = lower, len(x) // _LANES * _LANES
    if whole:
        # A maximum of several lanes at once: of one number LLVM makes no vectors.
        lanes = np.full(_LANES, lower, np.float32)
        for i in range(0, whole, _LANES):
            for j in range(_LANES):
                put(lanes, j, max(get(lanes, j), x[i + j]))
        for j in range(_LANES):
            most = max(most, lanes[j])
    for i in range(whole, len(x)):
        most = max(most, x[i])
    return most


@compiled
def exponentials(x: Any, most: Any) -> Any:
    """x = e^(x - most), and the sum."""
    total = np.float32(0.0)
    for i in range(len(x)):
        x[i] = exp(max(x[i] - most, np.float32(-88.0)))
        total += x[i]
    return total


@compiled
def sum_of_exponentials(x: Any, at: Any, count: Any, factor: Any, most: Any) -> Any:
    """Sum of e^(factor·x - most) over elements of a flat array, which stay as they are; none above 1."""
    total = np.float32(0.0)
    for i in range(count):
        total += exp(max(factor * get(x, at + i) - most, np.float32(-88.0)))
    return total


@compiled
def sum_of(x: Any) -> Any:
    """Sum of the elements."""
    total = np.float32(0.0)
    for i in range(len(x)):
        total += x[i]
    return total


@compiled
def scale(factor: Any, x: Any) -> None:
    """x *= factor."""
    for i in range(len(x)):
        x[i] *= factor
