"""Compiled attention on the CPU, to K and V as they lie: tile by tile, as far as it is called, then `finish`.

fp16 comes in, fp32 is computed with; a tile of K or V is widened once for all query heads of its KV head. Arrays are
C-contiguous.

Letters: g query heads of a KV head, d head dimension, S tokens.
Source: online softmax, Milakov and Gimelshein (arXiv 1805.02867).
"""

import math
from typing import Any

import numpy as np

from nearflash.inference.engines.cpu.compiled import (
    LOWEST,
    compiled,
    dot_half,
    entry_point,
    exp,
    exponentials,
    get,
    largest_of,
    put,
    scale,
    widen,
)
from nearflash.inference.engines.cpu.vectors import HEADS, LANES, add_values, dots

__all__ = [
    "are_finite",
    "attend",
    "attend_groups",
    "attend_memory",
    "attend_suffixes",
    "finish",
    "heads_at_once",
    "start",
]

_TILE = 128
"""Tokens whose logits are held at once."""


@compiled
def heads_at_once(left: Any) -> Any:
    """Of so many query heads that are left: up to HEADS, none of them alone where it can be."""
    return 2 if left == 4 else min(left, HEADS)


@compiled
def parts_at_once(left: Any) -> Any:
    """Of so many vectors of a token's V that are left: the most that `add_values` takes."""
    return 4 if left >= 4 else 2 if left >= 2 else 1


@compiled
def start(largest: Any, total: Any, out: Any) -> None:
    """An attention that has seen no token: largest, total (g,), out (g, d) in fp32."""
    for a in range(len(total)):
        largest[a] = LOWEST
        total[a] = np.float32(0.0)
        for i in range(out.shape[1]):
            out[a, i] = np.float32(0.0)


@compiled
def _logits(q: Any, keys: Any, at: Any, stride: Any, ahead: Any, size: Any, dim: Any, logits: Any) -> None:
    """logits (g, _TILE) of `size` tokens of `keys`, flat; q (g, d), flat, with zeros up to a number of vectors.

    `ahead`: where what is wanted next begins.
    """
    group = len(logits)
    padded, flat = len(q) // group, logits.reshape(-1)
    whole = size // LANES * LANES
    first = 0
    while first < group:
        heads = heads_at_once(group - first)
        for t in range(0, whole, LANES):
            dots(heads, q, first * padded, padded, keys, at + t * stride, stride, padded // LANES,
                 ahead + t * stride, 0 if first else LANES * stride // 32, flat, first * _TILE + t, _TILE)  # fmt: skip
        first += heads
    for a in range(group):
        for t in range(whole, size):
            put(flat, a * _TILE + t, dot_half(q, a * padded, keys, at + t * stride, dim))


@compiled
def _add_values(weights: Any, t: Any, count: Any, values: Any, at: Any, stride: Any, out: Any) -> None:
    """out (g, vectors of d), flat, += V of `count` tokens from token t on, by weights (g, _TILE)."""
    group = len(weights)
    padded, flat = len(out) // group, weights.reshape(-1)
    first = 0
    while first < group:
        heads = heads_at_once(group - first)
        part = 0
        while part < padded // LANES:
            parts = parts_at_once(padded // LANES - part)
            add_values(
                heads, parts, flat, first * _TILE + t, _TILE, values, at + t * stride + part * LANES, stride, count,
                out, first * padded + part * LANES, padded,
            )  # fmt: skip
            part += parts
        first += heads


@compiled
def _copied(values: Any, at: Any, stride: Any, size: Any, dim: Any, padded: Any, tile: Any) -> None:
    """`size` tokens of d elements into a tile, each `padded`."""
    for t in range(size):
        for i in range(dim):
            put(tile, t * padded + i, get(values, at + t * stride + i))


@compiled
def _soften(logits: Any, size: Any, softcap: Any, largest: Any, total: Any, out: Any) -> None:
    """Weights e^(logit - largest) of `size` tokens in place of their logits (g, _TILE); out (g, …), flat, follows."""
    group, flat = len(logits), logits.reshape(-1)
    each = len(out) // group
    for a in range(group):
        if softcap > 0:
            for t in range(size):
                if logits[a, t] > LOWEST:
                    logits[a, t] = softcap * np.float32(math.tanh(logits[a, t] / softcap))
        most = largest_of(flat, a * _TILE, size, largest[a])
        if most > largest[a]:
            kept = exp(max(largest[a] - most, np.float32(-88.0)))
            scale(kept, out, a * each, each)
            total[a] *= kept
            largest[a] = most
        total[a] += exponentials(flat, a * _TILE, size, np.float32(1.0), most)


@compiled
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
    padded = -(-dim // LANES) * LANES
    wide_q, flat = np.zeros(group * padded, np.float32), np.zeros(group * padded, np.float32)
    for a in range(group):
        for i in range(dim):
            wide_q[a * padded + i], flat[a * padded + i] = q[a, i], out[a, i]
    logits, tile = np.empty((group, _TILE), np.float32), np.zeros(0 if padded == dim else _TILE * padded, np.uint16)
    masked = len(chosen) > 0
    for run in range(len(k_at)):
        for begin in range(0, each, _TILE):
            size = min(_TILE, each - begin)
            taken = size
            if masked:
                taken = 0
                for t in range(size):
                    taken += chosen[run, begin + t]
                if not taken:
                    continue
            k, v = k_at[run] + begin * stride, v_at[run] + begin * stride
            ahead = k + _TILE * stride
            if begin + _TILE >= each:
                ahead = k_at[run + 1] if run + 1 < len(k_at) else k
            if padded == dim:
                _logits(wide_q, keys, k, stride, ahead, size, dim, logits)
            else:
                _copied(keys, k, stride, size, dim, padded, tile)
                _logits(wide_q, tile, 0, padded, 0, size, dim, logits)
            if taken < size:
                for t in range(size):
                    if not chosen[run, begin + t]:
                        for a in range(group):
                            logits[a, t] = LOWEST
            _soften(logits, size, softcap, largest, total, flat)
            if padded == dim:
                _add_taken(logits, chosen, run, begin, size, taken, values, v, stride, flat)
            else:
                _copied(values, v, stride, size, dim, padded, tile)
                _add_taken(logits, chosen, run, begin, size, taken, tile, 0, padded, flat)
    for a in range(group):
        for i in range(dim):
            out[a, i] = flat[a * padded + i]


@compiled
def _add_taken(
    weights: Any, chosen: Any, run: Any, begin: Any, size: Any, taken: Any, values: Any, at: Any, stride: Any,
    out: Any,
) -> None:  # fmt: skip
    """`_add_values` of the tokens of a run that count: `taken` of `size` from `begin` on."""
    step = size if taken == size else 1
    for t in range(0, size, step):
        if step == size or chosen[run, begin + t]:
            _add_values(weights, t, step, values, at, stride, out)


@entry_point
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
        widen(q[head].reshape(-1), 0, wide.reshape(-1), 0, group * dim)
        scale(scaling, wide.reshape(-1), 0, group * dim)
        start(largest, total, out[head])
        keys, values = suffixes[0, layer, head].reshape(-1), suffixes[1, layer, head].reshape(-1)
        attend(wide, keys, values, start_at, start_at, dim, tokens, every, softcap, largest, total, out[head])
        finish(sinks[head] if len(sinks) else mean[:0], alpha, mean, largest, total, out[head])


@entry_point
def attend_groups(
    q: Any, kept: Any, new: Any, places: Any, numbers: Any, ends: Any, elements: Any, v_from: Any, stride: Any,
    each: Any, chosen: Any, softcap: Any, largest: Any, total: Any, out: Any,
) -> None:  # fmt: skip
    """Go on with an attention of q (H, g, d) over KV page groups of `elements` each, flat in `kept` and `new`.

    Those of head h end at ends[h] in `places` (the place in kept, or -1 - that in new) and `numbers` (which groups).
    K begins a group, V is `v_from` behind it. chosen (H, S): which tokens count; (0, 0): all. Else as `attend`.
    """
    begin = 0
    for head in range(len(q)):
        count = ends[head] - begin
        k_at, number = np.empty(count, np.int64), np.empty(count, np.int64)
        for source in range(2):
            runs = 0
            for i in range(begin, ends[head]):
                place = places[i]
                if (place < 0) == (source == 1):
                    k_at[runs] = (place if source == 0 else -1 - place) * elements
                    number[runs] = numbers[i]
                    runs += 1
            masks = np.empty((runs if len(chosen) else 0, each if len(chosen) else 0), np.bool_)
            for run in range(len(masks)):
                masks[run] = chosen[head, number[run] * each : number[run] * each + each]
            data = kept if source == 0 else new
            at = k_at[:runs]
            attend(
                q[head], data, data, at, at + v_from, stride, each, masks, softcap, largest[head], total[head],
                out[head],
            )  # fmt: skip
        begin = ends[head]


@entry_point
def attend_suffixes(
    q: Any, heads: Any, keys: Any, values: Any, chosen: Any, softcap: Any, sinks: Any, alpha: Any, v_mean: Any,
    largest: Any, total: Any, out: Any,
) -> None:  # fmt: skip
    """End attentions of q (H, g, d) with the tokens of `heads` (H,) in memory: `attend`, then `finish`.

    keys and values: (all heads, u, d), each head's together. chosen (H, u): which count; (0, 0): all. sinks (all heads,
    g), or (0, 0): none; v_mean (all heads, d).
    """
    tokens, dim = keys.shape[1], q.shape[2]
    k_at, v_at = np.empty(1, np.int64), np.empty(1, np.int64)
    for own in range(len(q)):
        head = heads[own]
        if tokens:
            k_at[0], v_at[0] = head * keys.strides[0] // 2, head * values.strides[0] // 2
            masks = chosen[own : own + 1]
            attend(q[own], keys, values, k_at, v_at, dim, tokens, masks, softcap, largest[own], total[own], out[own])
        sink = sinks[head] if len(sinks) else v_mean[head, :0]
        finish(sink, alpha[own], v_mean[head], largest[own], total[own], out[own])


@entry_point
def are_finite(words: Any) -> Any:
    """Whether no fp16 number of a flat array is an infinity or NaN."""
    wrong = 0
    for i in range(len(words)):
        wrong += np.uint16(words[i] & np.uint16(0x7C00)) == np.uint16(0x7C00)
    return wrong == 0


@compiled
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
