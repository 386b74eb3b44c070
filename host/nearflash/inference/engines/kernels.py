"""Compiled loops of attention on the CPU: scores of index rows, the choice of tokens, attention to K and V as they lie.

    index rows, K of the suffix ─► logits ─► keys of entries ─► chosen tokens      attention, tile by tile (`attend`)

fp16 comes in, fp32 is computed with; a tile of K or V is widened once for all query heads of its KV head. numba makes
machine code of them for the processor at hand; they hold no lock of Python's. Sums may be taken in any order, so that
vector units can; nothing else is left to the compiler. Arrays are C-contiguous, fp16 is seen as uint16.

Letters: g query heads of a KV head, d head dimension, r dims of the score, S tokens, T tokens of an index block.
Source: online softmax, Milakov and Gimelshein (arXiv 1805.02867); 2^f as in the Cephes library (exp2f).
"""

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

__all__ = ["are_finite", "attend", "attend_memory", "choose", "finish", "score_index", "score_keys", "start", "weigh"]

_TILE = 64
"""Tokens whose logits are held at once."""
_BYTES = 256
"""Codes of a row that are scored at once."""
_LOG2E = np.float32(1.4426950408889634)
_LOWEST = np.float32(-3.0e38)
_BINS = 1 << 16
_ORDERS = {"reassoc", "contract", "nsz", "arcp"}


@intrinsic
def _fp16(_: Any, word: Any) -> Any:
    """fp32 number of fp16 bits."""

    def generate(_: Any, builder: Any, signature: Any, words: Any) -> Any:
        return builder.fpext(builder.bitcast(words[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


@intrinsic
def _fp16_bits(_: Any, value: Any) -> Any:
    """fp16 bits of an fp32 number, rounded to nearest even."""

    def generate(_: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.bitcast(builder.fptrunc(values[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), generate


@intrinsic
def _float(_: Any, word: Any) -> Any:
    """fp32 number of an int32's bits."""
    return types.float32(types.int32), lambda _, builder, signature, words: builder.bitcast(words[0], ir.FloatType())


@intrinsic
def _floor(_: Any, value: Any) -> Any:
    """fp32 number, rounded down."""

    def generate(_: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType()])
        return builder.call(builder.module.declare_intrinsic("llvm.floor", [ir.FloatType()], kind), values)

    return types.float32(types.float32), generate


def _compiled(function: Any) -> Any:
    return njit(nogil=True, error_model="numpy", fastmath=_ORDERS, cache=True)(function)


@_compiled
def _exp(x: Any) -> Any:
    """e^x of x <= 0 in fp32, to 2 units in the last place; 0 below -87."""
    y = max(x, np.float32(-87.0)) * _LOG2E
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


@_compiled
def _widen(values: Any, at: Any, row: Any) -> None:
    """fp32 of fp16 values at, at + 1, …; loops over slices need no check of what an index may be."""
    part = values[at : at + len(row)]
    for i in range(len(row)):
        row[i] = _fp16(part[i])


@_compiled
def _dot(x: Any, y: Any) -> Any:
    dot = np.float32(0.0)
    for i in range(len(y)):
        dot += x[i] * y[i]
    return dot


@_compiled
def _largest(x: Any, least: Any) -> Any:
    most = least
    for i in range(len(x)):
        most = max(most, x[i])
    return most


@_compiled
def _exponentials(x: Any, most: Any) -> Any:
    """x = e^(x - most), and the sum."""
    total = np.float32(0.0)
    for i in range(len(x)):
        x[i] = _exp(max(x[i] - most, np.float32(-88.0)))
        total += x[i]
    return total


@_compiled
def _sum(x: Any) -> Any:
    total = np.float32(0.0)
    for i in range(len(x)):
        total += x[i]
    return total


@_compiled
def _scale(factor: Any, x: Any) -> None:
    for i in range(len(x)):
        x[i] *= factor


@_compiled
def _add(weight: Any, x: Any, y: Any) -> None:
    """y += weight·x."""
    for i in range(len(x)):
        y[i] += weight * x[i]


@_compiled
def start(largest: Any, total: Any, out: Any) -> None:
    """An attention that has seen no token: largest, total (g,), out (g, d) in fp32."""
    for a in range(len(total)):
        largest[a] = _LOWEST
        total[a] = np.float32(0.0)
        for i in range(out.shape[1]):
            out[a, i] = np.float32(0.0)


@_compiled
def attend(
    q: Any, keys: Any, values: Any, k_at: Any, v_at: Any, stride: Any, each: Any, chosen: Any, softcap: Any,
    largest: Any, total: Any, out: Any,
) -> None:  # fmt: skip
    """Go on with an attention of q (g, d), scaled, over runs of `each` tokens.

    Of run j token t has its K at element k_at[j] + t·stride of `keys` and its V at v_at[j] + t·stride of `values`, both
    flat. chosen (runs, each) bool: which tokens count; (0, 0): all. softcap 0: none. largest, total, out: what `start`
    and earlier calls left; out is not divided by total yet.
    """
    group, dim = q.shape
    row = np.empty(dim, np.float32)
    logits = np.empty((group, _TILE), np.float32)
    masked = len(chosen) > 0
    for run in range(len(k_at)):
        for begin in range(0, each, _TILE):
            size = min(_TILE, each - begin)
            taken = 0
            for t in range(size):
                if masked and not chosen[run, begin + t]:
                    for a in range(group):
                        logits[a, t] = _LOWEST
                    continue
                taken += 1
                _widen(keys, k_at[run] + (begin + t) * stride, row)
                for a in range(group):
                    logits[a, t] = _dot(q[a], row)
            if not taken:
                continue
            for a in range(group):
                own = logits[a, :size]
                if softcap > 0:
                    for t in range(size):
                        if own[t] > _LOWEST:
                            own[t] = softcap * np.float32(math.tanh(own[t] / softcap))
                most = _largest(own, largest[a])
                kept = _exp(max(largest[a] - most, np.float32(-88.0)))
                _scale(kept, out[a])
                total[a] = total[a] * kept + _exponentials(own, most)
                largest[a] = most
            for t in range(size):
                if masked and not chosen[run, begin + t]:
                    continue
                _widen(values, v_at[run] + (begin + t) * stride, row)
                for a in range(group):
                    _add(logits[a, t], row, out[a])


@_compiled
def attend_memory(
    q: Any, suffixes: Any, layer: Any, tokens: Any, scaling: Any, softcap: Any, sinks: Any, out: Any
) -> None:  # fmt: skip
    """Attention of q (H, g, d) fp16 to a layer's `tokens`, all of them in memory: suffixes (2, layers, H, T, d) fp16.

    sinks (H, g), or (0, 0): none. out: (H, g, d) fp32.
    """
    heads, group, dim = q.shape
    wide = np.empty((group, dim), np.float32)
    largest, total, alpha = np.empty(group, np.float32), np.empty(group, np.float32), np.ones(group, np.float32)
    start_at, mean, every = np.zeros(1, np.int64), np.zeros(dim, np.float32), np.zeros((0, 0), np.bool_)
    for head in range(heads):
        for a in range(group):
            _widen(q[head, a], 0, wide[a])
            _scale(scaling, wide[a])
        start(largest, total, out[head])
        keys, values = suffixes[0, layer, head].reshape(-1), suffixes[1, layer, head].reshape(-1)
        attend(wide, keys, values, start_at, start_at, dim, tokens, every, softcap, largest, total, out[head])
        finish(sinks[head] if len(sinks) else mean[:0], alpha, mean, largest, total, out[head])


@_compiled
def are_finite(words: Any) -> Any:
    """Whether no fp16 number of a flat array is an infinity or NaN."""
    wrong = 0
    for i in range(len(words)):
        wrong += np.uint16(words[i] & np.uint16(0x7C00)) == np.uint16(0x7C00)
    return wrong == 0


@_compiled
def finish(sinks: Any, alpha: Any, v_mean: Any, largest: Any, total: Any, out: Any) -> None:
    """The attention's output in `out` (g, d): divided, mixed with the mean of V where alpha (g,) < 1, sinks counted.

    alpha: share of the chosen tokens in the softmax over all; sinks (g,): logits without a value; empty: none.
    """
    group, dim = out.shape
    for a in range(group):
        over = np.float32(1.0) / total[a]
        share = np.float32(alpha[a])
        for i in range(dim):
            out[a, i] = share * (out[a, i] * over) + (np.float32(1.0) - share) * v_mean[i]
        if len(sinks):
            # The sum over all tokens is total / share.
            gap = (largest[a] + math.log(total[a]) - math.log(share)) - sinks[a]
            kept = np.float32(1.0 / (1.0 + math.exp(-gap)))
            for i in range(dim):
                out[a, i] *= kept


@_compiled
def score_keys(q: Any, k: Any, first: Any, scores: Any) -> None:
    """Scores (g, S) of tokens first, first + 1, … with fp16 keys k (t, d): q (g, d), 0 outside the score's dims."""
    group, dim = q.shape
    row = np.empty(dim, np.float32)
    for t in range(len(k)):
        _widen(k[t], 0, row)
        for a in range(group):
            scores[a, first + t] = _dot(q[a], row)


@_compiled
def _nibbles(codes: Any, low: Any, high: Any) -> None:
    for b in range(len(codes)):
        low[b] = np.float32(codes[b] & np.uint8(15))
        high[b] = np.float32(codes[b] >> np.uint8(4))


@_compiled
def score_index(q: Any, codes: Any, factors: Any, rows: Any, bits: Any, scores: Any) -> None:
    """Scores (g, S) of the tokens of whole index blocks: q (g, r) against rows `rows` (r,) of each block.

    codes (B, R, T·bits/8) uint8: int4 (the lower nibble first), int8, or fp16 numbers; factors (B, R, 2) uint16: fp16
    scale and zero of each row, unused for fp16.
    """
    group, dims = q.shape
    blocks, _, length = codes.shape
    tokens = length * 8 // bits
    weights, base = np.empty((group, dims), np.float32), np.empty(group, np.float32)
    low, high = np.empty(_BYTES, np.float32), np.empty(_BYTES, np.float32)
    lows, highs = np.empty((group, _BYTES), np.float32), np.empty((group, _BYTES), np.float32)
    for block in range(blocks):
        for a in range(group):
            base[a] = np.float32(0.0)
            for j in range(dims):
                if bits == 16:
                    weights[a, j] = q[a, j]
                else:
                    weights[a, j] = q[a, j] * _fp16(factors[block, rows[j], 0])
                    base[a] += q[a, j] * _fp16(factors[block, rows[j], 1])
        for begin in range(0, length, _BYTES):
            size = min(_BYTES, length - begin)
            for a in range(group):
                for b in range(size):
                    lows[a, b] = base[a]
                    highs[a, b] = base[a]
            for j in range(dims):
                line = codes[block, rows[j], begin : begin + size]
                if bits == 4:
                    _nibbles(line, low, high)
                elif bits == 8:
                    for b in range(size):
                        low[b] = np.float32(line[b])
                else:
                    for b in range(size // 2):
                        low[b] = _fp16(np.uint16(np.uint16(line[2 * b]) | np.uint16(line[2 * b + 1]) << np.uint16(8)))
                for a in range(group):
                    _add(weights[a, j], low[:size], lows[a])
                    if bits == 4:
                        _add(weights[a, j], high[:size], highs[a])
            place = block * tokens + begin * 8 // bits
            for a in range(group):
                own = scores[a, place : place + size * 8 // bits]
                if bits == 4:
                    for b in range(size):
                        own[2 * b] = lows[a, b]
                        own[2 * b + 1] = highs[a, b]
                else:
                    for b in range(len(own)):
                        own[b] = lows[a, b]


@_compiled
def weigh(scores: Any, factors: Any, softcap: Any, each: Any, by_probability: Any, keys: Any) -> None:
    """Softmax, in place of scores (g, S), of factors (g,) times them; keys (E,) fp32: of entries of `each` tokens.

    A key is 2^12 times the entry's probability, summed over query heads; else the largest logits' sum, in powers of 2.
    softcap 0: none.
    """
    group, tokens = scores.shape
    for e in range(len(keys)):
        keys[e] = np.float32(0.0)
    for a in range(group):
        own, factor = scores[a], factors[a]
        _scale(factor, own)
        if softcap > 0:
            for t in range(tokens):
                own[t] = softcap * np.float32(math.tanh(own[t] / softcap))
        if not by_probability:
            for e in range(len(keys)):
                keys[e] += _largest(own[e * each : e * each + each], _LOWEST) * _LOG2E
        total = _exponentials(own, _largest(own, _LOWEST))
        _scale(np.float32(1.0) / total, own)
        if by_probability:
            for e in range(len(keys)):
                keys[e] += _sum(own[e * each : e * each + each])
    if by_probability:
        _scale(np.float32(4096.0), keys)


@_compiled
def choose(
    keys: Any, probabilities: Any, each: Any, window: Any, top_k: Any, top_p: Any, counts: Any, taken: Any, alpha: Any
) -> None:  # fmt: skip
    """Which entries are taken (E,) bool, and alpha (g,): their share of the probabilities (g, S).

    Entries that hold one of the last `window` tokens come first, then those with the largest fp16 key, the lower index
    first among equals: `top_k` of them; with top_p (2^-16) as many as hold that share of the keys, all with the last
    key needed, at most `top_k`. counts (2^16,) int32 zeros, and zeros again afterwards.
    """
    group, tokens = probabilities.shape
    entries = len(keys)
    local = max(tokens - window, 0)
    first_local = entries
    for e in range(entries):
        if e * each + each > local:
            first_local = e
            break
    total, reached = 0.0, 0.0
    low, high = _BINS, 0
    order = np.empty(entries, np.int32)
    for e in range(entries):
        bits = np.int32(_fp16_bits(keys[e]))
        rounded = np.float64(_fp16(np.uint16(bits)))
        total += rounded
        order[e] = bits ^ 0xFFFF if bits & 0x8000 else bits | 0x8000  # rises with the number
        if e >= first_local:
            reached += rounded
        else:
            counts[order[e]] += 1
            low, high = min(low, order[e]), max(high, order[e])
    needed = top_p / 65536.0 * total
    left = top_k - (entries - first_local)
    # From the largest key down: where the last one lies, and how many of those with it are taken.
    last, of_last = _BINS, 0
    if left > 0 and not (top_p and reached >= needed):
        place = high
        while place >= low:
            if counts[place]:
                last = place
                of_last = min(left, counts[place])
                left -= of_last
                word = place ^ 0x8000 if place & 0x8000 else place ^ 0xFFFF
                reached += counts[place] * np.float64(_fp16(np.uint16(word)))
                if not left or (top_p and reached >= needed):
                    break
            place -= 1
    for e in range(entries):
        if e >= first_local:
            taken[e] = True
        else:
            counts[order[e]] = 0
            taken[e] = order[e] > last
            if order[e] == last and of_last:
                taken[e] = True
                of_last -= 1
    for a in range(group):
        share = np.float32(0.0)
        for e in range(entries):
            if taken[e]:
                share += _sum(probabilities[a, e * each : e * each + each])
        alpha[a] = share
