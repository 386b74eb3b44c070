"""Compiled scores on the CPU, and the choice that follows from them.

    index rows, K of the suffix ─► logits ─► keys of entries ─► chosen entries

Letters: g query heads of a KV head, d head dimension, r dims of the score, S tokens, T tokens of an index block. Arrays
are C-contiguous.
"""

import math
from typing import Any

import numpy as np

from nearflash.inference.engines.cpu.compiled import (
    LOG2E,
    LOWEST,
    compiled,
    dot_half,
    entry_point,
    exponentials,
    fp16,
    fp16_bits,
    get,
    largest_of,
    put,
    scale,
    sum_of_exponentials,
)
from nearflash.inference.engines.cpu.kernels import heads_at_once
from nearflash.inference.engines.cpu.vectors import LANES, ROW_TOKENS, score_few, score_rows

__all__ = ["choose", "choose_heads", "score_index", "score_keys", "weigh"]

_BINS = 1 << 16


@compiled
def score_keys(q: Any, k: Any, first: Any, scores: Any) -> None:
    """Scores (g, S) of tokens first, first + 1, … with fp16 keys k (t, d): q (g, d), 0 outside the score's dims."""
    group, dim = q.shape
    flat, keys = q.reshape(-1), k.reshape(-1)
    for t in range(len(k)):
        for a in range(group):
            scores[a, first + t] = dot_half(flat, a * dim, keys, t * dim, dim)


@compiled
def score_index(q: Any, codes: Any, factors: Any, rows: Any, bits: Any, scores: Any) -> None:
    """Scores (g, S) of the tokens of whole index blocks: q (g, r) against rows `rows` (r,) of each block.

    codes (B, R, T·bits/8) uint8: int4 (the lower nibble first), int8, or fp16 numbers; factors (B, R, 2) uint16: fp16
    scale and zero of each row, unused for fp16.
    """
    group, dims = q.shape
    blocks, lines, length = codes.shape
    tokens, width = length * 8 // bits, scores.shape[1]
    whole, few = tokens // ROW_TOKENS * ROW_TOKENS, 16 if bits == 4 else 8
    flat, flat_scores = codes.reshape(-1), scores.reshape(-1)
    weights, base = np.empty(group * dims, np.float32), np.empty(group, np.float32)
    for block in range(blocks):
        _weights(q, factors[block], rows, bits, weights, base)
        at, ahead = block * lines * length, (block + 1) * lines * length
        first = 0
        while first < group:
            heads = heads_at_once(group - first)
            to = first * width + block * tokens
            for t in range(0, whole, ROW_TOKENS):
                byte = t * bits // 8
                score_rows(heads, bits, flat, at + byte, length, rows, dims, ahead + byte, weights, first * dims, dims,
                           base, first, flat_scores, to + t, width)  # fmt: skip
            for t in range(whole, tokens, few):
                byte = t * bits // 8
                score_few(heads, bits, flat, at + byte, length, rows, dims, ahead + byte, weights, first * dims, dims,
                          base, first, flat_scores, to + t, width)  # fmt: skip
            first += heads


@compiled
def _weights(q: Any, factors: Any, rows: Any, bits: Any, weights: Any, base: Any) -> None:
    """Of a block: q (g, r) times each row's scale, flat, and the sums (g,) of q times the rows' zeros."""
    group, dims = q.shape
    for a in range(group):
        base[a] = np.float32(0.0)
        for j in range(dims):
            weights[a * dims + j] = q[a, j]
            if bits != 16:
                weights[a * dims + j] *= fp16(factors[rows[j], 0])
                base[a] += q[a, j] * fp16(factors[rows[j], 1])


@compiled
def weigh(
    scores: Any, factors: Any, softcap: Any, each: Any, by_probability: Any, keys: Any, shares: Any
) -> None:  # fmt: skip
    """`shares` (g, E): probabilities of entries of `each` tokens, by the softmax of factors (g,) times scores (g, S).

    keys (E,) fp32: 2^12 times the entry's probability, summed over query heads; else the largest logits' sum, in powers
    of 2. softcap 0: none. The scores are others afterwards.
    """
    group, tokens = scores.shape
    flat, entries = scores.reshape(-1), len(keys)
    for e in range(entries):
        keys[e] = np.float32(0.0)
    for a in range(group):
        factor, first = factors[a], a * tokens
        if softcap > 0:
            for t in range(first, first + tokens):
                put(flat, t, softcap * np.float32(math.tanh(get(flat, t) * factor / softcap)))
            factor = np.float32(1.0)
        if factor < 0:
            scale(factor, flat, first, tokens)
            factor = np.float32(1.0)
        if not by_probability:
            for e in range(entries):
                count = min(each, tokens - e * each)
                keys[e] += factor * largest_of(flat, first + e * each, count, LOWEST) * LOG2E
        most, total = factor * largest_of(flat, first, tokens, LOWEST), np.float32(0.0)
        if each < LANES:
            total = exponentials(flat, first, tokens, factor, most)
            for e in range(entries):
                share = np.float32(0.0)
                for t in range(first + e * each, first + min(e * each + each, tokens)):
                    share += get(flat, t)
                shares[a, e] = share
        else:
            for e in range(entries):
                count = min(each, tokens - e * each)
                shares[a, e] = sum_of_exponentials(flat, first + e * each, count, factor, most)
                total += shares[a, e]
        over = np.float32(1.0) / total
        for e in range(entries):
            shares[a, e] *= over
            if by_probability:
                keys[e] += np.float32(4096.0) * shares[a, e]


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


@entry_point
def choose_heads(
    q: Any, dims: Any, codes: Any, factors: Any, rows: Any, bits: Any, suffix: Any, covered: Any, scaling: Any,
    softcap: Any, each: Any, by_probability: Any, window: Any, top_k: Any, top_p: Any, scores: Any, counts: Any,
    taken: Any, alpha: Any,
) -> None:  # fmt: skip
    """`taken` (H, E) and `alpha` (H, g) of heads, one after the other: scores by index and suffix, `weigh`, `choose`.

    q (H, g, d) is scored over dims (H, r), which are the index's `rows` (H, r); a score is a logit when it is
    multiplied by `scaling` and by the root of |q| over that of these dims. suffix (H, t, d): K of the tokens after the
    `covered` ones of the index. scores (g, S), counts: room, as these functions take it.
    """
    heads, group, dim = q.shape
    near, partly = np.empty((group, dims.shape[1]), np.float32), np.empty((group, dim), np.float32)
    keys, shares = np.empty(taken.shape[1], np.float32), np.empty((group, taken.shape[1]), np.float32)
    scales = np.empty(group, np.float32)
    for head in range(heads):
        for a in range(group):
            every, chosen = np.float32(0.0), np.float32(0.0)
            for i in range(dim):
                partly[a, i] = np.float32(0.0)
                every += abs(q[head, a, i])
            for j in range(dims.shape[1]):
                near[a, j] = partly[a, dims[head, j]] = q[head, a, dims[head, j]]
                chosen += abs(near[a, j])
            scales[a] = scaling * np.float32(math.sqrt(every / chosen)) if chosen > 0 else scaling
        score_index(near, codes[head], factors[head], rows[head], bits, scores)
        score_keys(partly, suffix[head], covered, scores)
        weigh(scores, scales, softcap, each, by_probability, keys, shares)
        choose(keys, shares, each, scores.shape[1], window, top_k, top_p, counts, taken[head], alpha[head])
