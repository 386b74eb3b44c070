"""Compiled scores on the CPU, and the choice that follows from them.

    index rows, K of the suffix ─► logits ─► keys of entries ─► chosen entries

Letters: g query heads of a KV head, d head dimension, r dims of the score, S tokens, T tokens of an index block. Arrays
are C-contiguous.
"""

import math
from typing import Any

import numpy as np

from nearflash.inference.engines.compiled import (
    LOG2E,
    LOWEST,
    ROWS,
    add_rows,
    compiled,
    dot,
    exponentials,
    fetch,
    fp16,
    fp16_bits,
    get,
    largest_of,
    put,
    scale,
    sum_of,
    sum_of_exponentials,
    widen,
)

__all__ = ["choose", "choose_heads", "score_index", "score_keys", "weigh"]

_BYTES = 512
"""Codes of a row that are scored at once."""
_LINE = 64
"""Bytes of a cache line."""
_BINS = 1 << 16
_RUN = 16
"""Tokens of an entry from which on its probability is summed by itself."""


@compiled
def score_keys(q: Any, k: Any, first: Any, scores: Any) -> None:
    """Scores (g, S) of tokens first, first + 1, … with fp16 keys k (t, d): q (g, d), 0 outside the score's dims."""
    group, dim = q.shape
    flat, keys, row = q.reshape(-1), k.reshape(-1), np.empty(dim, np.float32)
    for t in range(len(k)):
        widen(keys, t * dim, row, 0, dim)
        for a in range(group):
            scores[a, first + t] = dot(flat, a * dim, row, 0, dim)


@compiled
def _numbers(codes: Any, at: Any, bits: Any, low: Any, high: Any, to: Any, size: Any) -> None:
    """Numbers of `size` bytes of codes: of int4 the lower nibbles in `low`, the upper in `high`; else all in `low`."""
    if bits == 4:
        for b in range(size):
            both = np.int32(get(codes, at + b))
            put(low, to + b, np.float32(both & np.int32(15)))
            put(high, to + b, np.float32(both >> np.int32(4)))
    elif bits == 8:
        for b in range(size):
            put(low, to + b, np.float32(get(codes, at + b)))
    else:
        for b in range(size // 2):
            word = np.uint16(get(codes, at + 2 * b)) | np.uint16(get(codes, at + 2 * b + 1)) << np.uint16(8)
            put(low, to + b, fp16(np.uint16(word)))


@compiled
def score_index(q: Any, codes: Any, factors: Any, rows: Any, bits: Any, scores: Any) -> None:
    """Scores (g, S) of the tokens of whole index blocks: q (g, r) against rows `rows` (r,) of each block.

    codes (B, R, T·bits/8) uint8: int4 (the lower nibble first), int8, or fp16 numbers; factors (B, R, 2) uint16: fp16
    scale and zero of each row, unused for fp16.
    """
    group, dims = q.shape
    blocks, lines, length = codes.shape
    tokens, padded = length * 8 // bits, -(-dims // ROWS) * ROWS
    flat, flat_scores, width = codes.reshape(-1), scores.reshape(-1), scores.shape[1]
    weights, base = np.zeros(group * padded, np.float32), np.empty(group, np.float32)
    low, high = np.zeros(ROWS * _BYTES, np.float32), np.zeros(ROWS * _BYTES, np.float32)
    sums = np.empty(2 * group * _BYTES, np.float32)
    for block in range(blocks):
        for a in range(group):
            base[a] = np.float32(0.0)
            for j in range(dims):
                weights[a * padded + j] = q[a, j]
                if bits != 16:
                    weights[a * padded + j] *= fp16(factors[block, rows[j], 0])
                    base[a] += q[a, j] * fp16(factors[block, rows[j], 1])
        for begin in range(0, length, _BYTES):
            size = min(_BYTES, length - begin)
            count = size // 2 if bits == 16 else size
            for a in range(group):
                for b in range(2 * _BYTES):
                    put(sums, 2 * a * _BYTES + b, base[a])
            for j in range(0, dims, ROWS):
                ahead, after = (block, j + ROWS) if j + ROWS < dims else (block + 1, 0)
                if ahead < blocks:
                    for u in range(min(ROWS, dims - after)):
                        at = (ahead * lines + rows[after + u]) * length + begin
                        for b in range(0, size, _LINE):
                            fetch(flat, at + b)
                for u in range(min(ROWS, dims - j)):
                    at = (block * lines + rows[j + u]) * length + begin
                    _numbers(flat, at, bits, low, high, u * _BYTES, size)
                for a in range(group):
                    first, to = a * padded + j, 2 * a * _BYTES
                    add_rows(weights, first, low, 0, _BYTES, sums, to, count)
                    if bits == 4:
                        add_rows(weights, first, high, 0, _BYTES, sums, to + _BYTES, count)
            for a in range(group):
                place, at = a * width + block * tokens + begin * 8 // bits, 2 * a * _BYTES
                if bits == 4:
                    for b in range(size):
                        put(flat_scores, place + 2 * b, get(sums, at + b))
                        put(flat_scores, place + 2 * b + 1, get(sums, at + _BYTES + b))
                else:
                    for b in range(count):
                        put(flat_scores, place + b, get(sums, at + b))


@compiled
def weigh(
    scores: Any, factors: Any, softcap: Any, each: Any, by_probability: Any, keys: Any, shares: Any
) -> None:  # fmt: skip
    """`shares` (g, E): probabilities of entries of `each` tokens, by the softmax of factors (g,) times scores (g, S).

    keys (E,) fp32: 2^12 times the entry's probability, summed over query heads; else the largest logits' sum, in powers
    of 2. softcap 0: none. The scores are others afterwards.
    """
    group, tokens = scores.shape
    flat = scores.reshape(-1)
    for e in range(len(keys)):
        keys[e] = np.float32(0.0)
    for a in range(group):
        own, factor, first = scores[a], factors[a], a * tokens
        if softcap > 0:
            for t in range(tokens):
                own[t] = softcap * np.float32(math.tanh(own[t] * factor / softcap))
            factor = np.float32(1.0)
        if factor < 0 or each < _RUN:
            scale(factor, own)
            factor = np.float32(1.0)
        if not by_probability:
            for e in range(len(keys)):
                keys[e] += factor * largest_of(own[e * each : e * each + each], LOWEST) * LOG2E
        most, total = factor * largest_of(own, LOWEST), np.float32(0.0)
        if each < _RUN:
            total = exponentials(own, most)
            for e in range(len(keys)):
                shares[a, e] = sum_of(own[e * each : e * each + each])
        else:
            for e in range(len(keys)):
                count = min(each, tokens - e * each)
                shares[a, e] = sum_of_exponentials(flat, first + e * each, count, factor, most)
                total += shares[a, e]
        over = np.float32(1.0) / total
        for e in range(len(keys)):
            shares[a, e] *= over
            if by_probability:
                keys[e] += shares[a, e]
    if by_probability:
        scale(np.float32(4096.0), keys)


@compiled
def choose(
    keys: Any, shares: Any, each: Any, tokens: Any, window: Any, top_k: Any, top_p: Any, counts: Any, taken: Any,
    alpha: Any,
) -> None:  # fmt: skip
    """Which entries of `each` tokens are taken (E,) bool, and alpha (g,): the sum of their `shares` (g, E).

    Entries that hold one of the last `window` tokens come first, then those with the largest fp16 key, the lower index
    first among equals: `top_k` of them; with top_p (2^-16) as many as hold that share of the keys, all with the last
    key needed, at most `top_k`. counts (2^16,) int32 zeros, and zeros again afterwards.
    """
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
        bits = np.int32(fp16_bits(keys[e]))
        rounded = np.float64(fp16(np.uint16(bits)))
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
                reached += counts[place] * np.float64(fp16(np.uint16(word)))
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
    for a in range(len(alpha)):
        share = np.float32(0.0)
        for e in range(entries):
            if taken[e]:
                share += shares[a, e]
        alpha[a] = share


@compiled
def choose_heads(
    near: Any, partly: Any, codes: Any, factors: Any, rows: Any, bits: Any, suffix: Any, covered: Any, scales: Any,
    softcap: Any, each: Any, by_probability: Any, window: Any, top_k: Any, top_p: Any, scores: Any, keys: Any,
    shares: Any, counts: Any, taken: Any, alpha: Any,
) -> None:  # fmt: skip
    """`taken` (H, E) and `alpha` (H, g) of heads, one after the other: scores by index and suffix, `weigh`, `choose`.

    near (H, g, r) and partly (H, g, d): q of the score's dims, alone and among zeros. suffix (H, t, d): K of the tokens
    after the `covered` ones of the index. scores (g, S), keys, shares, counts: room, as these functions take it.
    """
    for head in range(len(near)):
        score_index(near[head], codes[head], factors[head], rows[head], bits, scores)
        score_keys(partly[head], suffix[head], covered, scores)
        weigh(scores, scales[head], softcap, each, by_probability, keys, shares)
        choose(keys, shares, each, scores.shape[1], window, top_k, top_p, counts, taken[head], alpha[head])
