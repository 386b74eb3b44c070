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
from numba import config, njit, types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from nearflash.abi.errors import ConfigError
from nearflash.inference.engines.cpu import vector_code, vectors
from nearflash.inference.engines.cpu.vectors import LANES, POLYNOMIAL, exponentials_of, exponentials_sum, largest_in
from nearflash.support.folders import check_private

__all__ = [
    "LOG2E", "LOWEST", "compiled", "dot_half", "entry_point", "exp", "exponentials", "fp16", "fp16_bits", "get",
    "largest_of", "put", "scale", "sum_of_exponentials", "widen",
]  # fmt: skip

LOG2E = np.float32(vector_code.LOG2E)
LOWEST = np.float32(-3.0e38)
"""A logit that is none."""
_OWN = sorted({*Path(__file__).parent.glob("*.py"), Path(vectors.__file__), Path(vector_code.__file__)})
_DIGEST = hashlib.sha256(b"".join(file.read_bytes() for file in _OWN)).hexdigest()
_OPTIONS = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz", "arcp"}}


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
def _floor(_: Any, value: Any) -> Any:
    """fp32 number, rounded down."""

    def generate(_: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType()])
        return builder.call(builder.module.declare_intrinsic("llvm.floor", [ir.FloatType()], kind), values)

    return types.float32(types.float32), generate


def compiled(function: Any) -> Any:
    """Decorator: machine code as a part of each entry point that calls it.

    As code of its own there would be a copy in each module that calls it, of which the one counts that was loaded
    first; and their sums may be in different orders.
    """
    return njit(**_OPTIONS, forceinline=True)(function)


def entry_point(function: Any) -> Any:
    """Decorator of what Python calls: `compiled`, and kept on disk while the modules that it is made of do not change.

    Entry points call none of each other, so that each is one piece, and gives the same bits from disk as when it was
    just compiled.
    """
    _check_numba_cache()
    made = njit(**_OPTIONS, cache=True)(function)
    # numba compares the function's own file alone, but what it calls of these is a part of its code.
    kept = made._cache._cache_file
    kept._source_stamp = (*kept._source_stamp, _DIGEST)
    return made


def _check_numba_cache() -> None:
    """Raise ConfigError where NUMBA_CACHE_DIR names a folder that others can write to: what lies there is run."""
    given = config.CACHE_DIR
    try:
        if given and Path(given).exists():
            check_private(Path(given))
    except OSError as error:
        raise ConfigError(
            f"NUMBA_CACHE_DIR must be a folder that only you can write to, as what lies there is run, but "
            f"{error.filename}: {error.strerror}"
        ) from error


@compiled
def exp(x: Any) -> Any:
    """e^x of x <= 0 in fp32, with a relative error below (2 + |x|)·2^-23; 0 from -87 down."""
    y = max(x, np.float32(-87.0)) * LOG2E
    n = _floor(np.float32(y + np.float32(0.5)))
    f = np.float32(y - n)
    p = POLYNOMIAL[0]
    for step in range(1, len(POLYNOMIAL)):
        p = p * f + POLYNOMIAL[step]
    power = _float(np.int32(np.int32(n) + np.int32(127)) << np.int32(23))
    return p * power if x > np.float32(-87.0) else np.float32(0.0)


@compiled
def widen(values: Any, at: Any, wide: Any, to: Any, count: Any) -> None:
    """fp32 of fp16 values."""
    for i in range(count):
        put(wide, to + i, fp16(get(values, at + i)))


@compiled
def dot_half(x: Any, x_at: Any, y: Any, y_at: Any, count: Any) -> Any:
    """Scalar product of x with fp16 y."""
    total = np.float32(0.0)
    for i in range(count):
        total += get(x, x_at + i) * fp16(get(y, y_at + i))
    return total


@compiled
def largest_of(x: Any, at: Any, count: Any, lower: Any) -> Any:
    """The largest of `count` elements of a flat array, `lower` at least."""
    whole = count // LANES
    most = largest_in(x, at, whole, lower)
    for i in range(whole * LANES, count):
        most = max(most, get(x, at + i))
    return most


@compiled
def exponentials(x: Any, at: Any, count: Any, factor: Any, most: Any) -> Any:
    """x = e^(factor·x - most) of elements of a flat array, none above 1, and the sum."""
    whole = count // LANES
    total = exponentials_of(x, at, whole, factor, most)
    for i in range(at + whole * LANES, at + count):
        put(x, i, exp(max(factor * get(x, i) - most, np.float32(-88.0))))
        total += get(x, i)
    return total


@compiled
def sum_of_exponentials(x: Any, at: Any, count: Any, factor: Any, most: Any) -> Any:
    """The sum of `exponentials`, which leaves x as it is."""
    whole = count // LANES
    total = exponentials_sum(x, at, whole, factor, most)
    for i in range(at + whole * LANES, at + count):
        total += exp(max(factor * get(x, i) - most, np.float32(-88.0)))
    return total


@compiled
def scale(factor: Any, x: Any, at: Any, count: Any) -> None:
    """Elements of a flat array *= factor."""
    for i in range(at, at + count):
        put(x, i, factor * get(x, i))
