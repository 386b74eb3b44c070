"""Inner loops of attention as vector code, each sum in a register: what compilers do not find in plain loops.

LLVM makes of it what the processor at hand has. Arrays are flat, places are of their elements, fp16 is seen as uint16.
The loops over rows, K and V are there for up to HEADS query heads at once, which share what is loaded and converted.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from nearflash.inference.engines.cpu.vector_code import Code

__all__ = ["HEADS", "LANES", "PARTS", "POLYNOMIAL", "ROW_TOKENS", "add_values", "dots", "exponentials_of",
           "exponentials_sum", "largest_in", "score_few", "score_rows"]  # fmt: skip

LANES = 16 if binding.get_host_cpu_features().get("avx512f") else 8
"""fp32 numbers of a vector."""
HEADS = 3
"""Query heads at once: with more the sums do not fit the processor's registers."""
PARTS = (1, 2, 4)
"""Vectors of a token's V at once."""
_SUMS = LANES // 2
"""Vectors of sums of each query head in `score_rows`."""
ROW_TOKENS = _SUMS * LANES
"""Tokens that `score_rows` scores."""
_FEW = 8
"""Lanes of `score_few`."""
_KEYS = 4
"""Tokens of `dots` at once."""
_FORMATS = (4, 8, 16)
POLYNOMIAL = tuple(np.float32(factor) for factor in (
    1.535336188319500e-4, 1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2, 2.402264791363012e-1,
    6.931472028550421e-1, 1.0,
))  # fmt: skip
"""Of 2^f."""


def _counted(heads: Any, code: Code, write: Callable[[int], None]) -> None:
    """Code for each number of query heads; the one of `heads` runs."""
    for count in range(1, HEADS + 1):
        with code.b.if_then(code.b.icmp_signed("==", heads, code.at(count))):
            write(count)


def _numbers(code: Code, bits: int, codes: Any, place: Any) -> list[Any]:
    """Vectors of numbers of one load; of int4 those of the even tokens, then those of the odd ones."""
    if bits == 16:
        return [code.halves(code.b.bitcast(codes, ir.IntType(16).as_pointer()), code.b.lshr(place, code.at(1)))]
    wide = code.b.zext(code.load(codes, place, ir.IntType(8), 1), code.of(ir.IntType(32)))
    if bits == 8:
        return [code.b.sitofp(wide, code.of(ir.FloatType()))]
    return [code.b.sitofp(part, code.of(ir.FloatType())) for part in (code.low_bits(wide, 4), code.shifted(wide, 4))]


def _write_rows(code: Code, args: Any, heads: int, bits: int, sums_each: int) -> None:
    """Of `score_rows`, with so many vectors of sums of each query head."""
    b, lanes = code.b, code.lanes
    codes, at, length, rows, dims, ahead, weights, first, between, base, base_at, scores, to, width = args
    each = 2 if bits == 4 else 1
    size = lanes * 2 if bits == 16 else lanes
    sums = [
        [code.variable(code.all(base, b.add(base_at, code.at(head)))) for _ in range(sums_each)]
        for head in range(heads)
    ]
    with cgutils.for_range(b, dims) as loop:
        line = b.mul(b.load(b.gep(rows, [loop.index])), length)
        for byte in range(0, sums_each // each * size, 64):
            code.fetch(codes, b.add(b.add(ahead, line), code.at(byte)), soon=True)
        factors = [code.all(weights, code.place(first, between, head, loop.index)) for head in range(heads)]
        for load in range(sums_each // each):
            found = _numbers(code, bits, codes, b.add(b.add(at, line), code.at(load * size)))
            for head, (part, number) in product(range(heads), enumerate(found)):
                code.add_to(sums[head][load * each + part], factors[head], number)
    zipped = [[place // 2 + half + lanes * (place % 2) for place in range(lanes)] for half in (0, lanes // 2)]
    for head in range(heads):
        done = [b.load(vector) for vector in sums[head]]
        for pair in range(0, len(done) if bits == 4 else 0, 2):
            done[pair : pair + 2] = [code.pick(done[pair], done[pair + 1], order) for order in zipped]
        for number, vector in enumerate(done):
            code.store(scores, b.add(code.place(to, width, head), code.at(number * lanes)), vector)


def _score(name: str, lanes: int, sums: Callable[[int], int]) -> Any:
    """`score_rows` or `score_few`: `sums` are vectors of each query head, by bits."""

    def write(code: Code) -> None:
        heads, form, *args = code.args
        for bits in _FORMATS:
            with code.b.if_then(code.b.icmp_signed("==", form, code.at(bits))):
                _counted(heads, code, lambda count: _write_rows(code, args, count, bits, sums(bits)))  # noqa: B023

    @intrinsic
    def score(
        _: Any, heads: Any, bits: Any, codes: Any, at: Any, length: Any, rows: Any, dims: Any, ahead: Any,
        weights: Any, first: Any, between: Any, base: Any, base_at: Any, scores: Any, to: Any, width: Any,
    ) -> Any:  # fmt: skip
        place = types.intp
        kinds = types.none(place, place, codes, place, place, rows, place, place, weights, place, place, base, place,
                           scores, place, place)  # fmt: skip
        return kinds, Code.function(name, write, lanes)

    return score


score_rows = _score("nearflash_score_rows", LANES, lambda bits: _SUMS)
"""Scores of ROW_TOKENS tokens for `heads` query heads, each `base` (at base_at, …) and the sum over `dims` of weights
times the numbers of its row: (heads, bits, codes, at, length, rows, dims, ahead, weights, first, between, base,
base_at, scores, to, width). Row rows[j] of `length` bytes begins at `at` + rows[j]·length in codes; its weights lie at
first + j, those of the next head `between` behind. Scores of the heads lie `width` apart. As many bytes of the same
rows from `ahead` on, which need not be there, are asked for."""
score_few = _score("nearflash_score_few", _FEW, lambda bits: 2 if bits == 4 else 1)
"""`score_rows` of 16 tokens of int4, 8 of int8 or fp16."""


def _write_dots(code: Code, args: Any, heads: int) -> None:
    b = code.b
    q, q_at, between, keys, at, stride, parts, ahead, lines, logits, to, width = args
    partial: list[list[Any]] = [[] for _ in range(heads)]
    with cgutils.for_range(b, lines) as loop:
        code.fetch(keys, b.add(ahead, b.mul(loop.index, code.at(32))), soon=False)
    for first in range(0, LANES, _KEYS):
        sums = [[code.variable(code.zeros()) for _ in range(_KEYS)] for _ in range(heads)]
        starts = [code.place(at, stride, first + token) for token in range(_KEYS)]
        with cgutils.for_range(b, parts) as loop:
            offset = b.mul(loop.index, code.at(LANES))
            wide = [code.halves(keys, b.add(start, offset)) for start in starts]
            for head in range(heads):
                own = code.floats(q, code.place(q_at, between, head, offset))
                for token in range(_KEYS):
                    code.add_to(sums[head][token], own, wide[token])
        for head in range(heads):
            partial[head] += [b.load(one) for one in sums[head]]
    for head in range(heads):
        code.store(logits, code.place(to, width, head), code.folded(partial[head]))


@intrinsic
def dots(
    _: Any, heads: Any, q: Any, q_at: Any, between: Any, keys: Any, at: Any, stride: Any, parts: Any, ahead: Any,
    lines: Any, logits: Any, to: Any, width: Any,
) -> Any:  # fmt: skip
    """Scalar products of the q of `heads` query heads, `between` apart, with LANES tokens' K, `stride` apart.

    All have `parts` vectors; the products of the heads lie `width` apart. Cache lines from `ahead` on,
    which need not be there, are asked for.
    """
    place = types.intp
    kinds = types.none(place, q, place, place, keys, place, place, place, place, place, logits, place, place)

    def write(code: Code) -> None:
        _counted(code.args[0], code, lambda count: _write_dots(code, code.args[1:], count))

    return kinds, Code.function("nearflash_dots", write, LANES)


def _write_values(code: Code, args: Any, heads: int, parts: int) -> None:
    b = code.b
    weights, first, width, values, at, stride, count, out, out_at, between = args
    places = [[code.place(out_at, between, head, code.at(part * LANES)) for part in range(parts)]
              for head in range(heads)]  # fmt: skip
    sums = [[code.variable(code.floats(out, place)) for place in own] for own in places]
    with cgutils.for_range(b, count) as loop:
        start = b.add(at, b.mul(stride, loop.index))
        wide = [code.halves(values, b.add(start, code.at(part * LANES))) for part in range(parts)]
        for head in range(heads):
            weight = code.all(weights, code.place(first, width, head, loop.index))
            for part in range(parts):
                code.add_to(sums[head][part], weight, wide[part])
    for head, part in product(range(heads), range(parts)):
        code.store(out, places[head][part], b.load(sums[head][part]))


@intrinsic
def add_values(
    _: Any, heads: Any, parts: Any, weights: Any, first: Any, width: Any, values: Any, at: Any, stride: Any,
    count: Any, out: Any, out_at: Any, between: Any,
) -> Any:  # fmt: skip
    """Add to `out` of `heads` query heads, `between` apart, the V of `count` tokens by their weights, `width` apart.

    Of V and out these are some of PARTS vectors.
    """
    place = types.intp
    kinds = types.none(place, place, weights, place, place, values, place, place, place, out, place, place)

    def write(code: Code) -> None:
        heads, parts, *args = code.args
        for some in PARTS:
            with code.b.if_then(code.b.icmp_signed("==", parts, code.at(some))):
                _counted(heads, code, lambda count: _write_values(code, args, count, some))  # noqa: B023

    return kinds, Code.function("nearflash_add_values", write, LANES)


@intrinsic
def largest_in(_: Any, x: Any, at: Any, vectors: Any, lower: Any) -> Any:
    """The largest of so many vectors' elements, `lower` at least."""

    def write(code: Code) -> Any:
        x, at, vectors, lower = code.args
        most = code.variable(code.splat(lower))
        with cgutils.for_range(code.b, vectors) as loop:
            place = code.b.add(at, code.b.mul(loop.index, code.at(LANES)))
            code.b.store(code.larger(code.floats(x, place), code.b.load(most)), most)
        return code.reduced(code.b.load(most), code.larger)

    return types.float32(x, types.intp, types.intp, types.float32), Code.generator(write, LANES)


def _exponentials(*, keeps: bool) -> Any:
    """`exponentials_of` or `exponentials_sum`."""

    def write(code: Code) -> Any:
        b = code.b
        x, at, vectors, factor, most = code.args
        total, factor, most = code.variable(code.zeros()), code.splat(factor), code.splat(most)
        with cgutils.for_range(b, vectors) as loop:
            place = b.add(at, b.mul(loop.index, code.at(LANES)))
            scaled = b.fmul(factor, code.floats(x, place), flags=code.flags)
            result = code.exp(b.fsub(scaled, most, flags=code.flags), POLYNOMIAL)
            code.b.store(code.add(b.load(total), result), total)
            if keeps:
                code.store(x, place, result)
        return code.reduced(b.load(total), code.add)

    @intrinsic
    def exponentials(_: Any, x: Any, at: Any, vectors: Any, factor: Any, most: Any) -> Any:
        number = types.float32
        return number(x, types.intp, types.intp, number, number), Code.generator(write, LANES)

    return exponentials


exponentials_of = _exponentials(keeps=True)
"""So many vectors' x = e^(factor·x - most), none above 1, and their sum: (x, at, vectors, factor, most)."""
exponentials_sum = _exponentials(keeps=False)
"""The sum of `exponentials_of`, which leaves x as it is."""
