"""Compiled attention on the CPU, to K and V as they lie: tile by tile, as far as it is called, then `finish`.

fp16 comes in, fp32 is computed with; a tile of K or V is widened once for all query heads of its KV head. Arrays are
C-contiguous.

Letters: g query heads of a KV head, d head dimension, S tokens.
Source: online softmax, Milakov and Gimelshein (arXiv 1805.02867).
"""

import math
from typing import Any

import numpy as np

from nearflash.inference.engines.compiled import (
    LOWEST,
    ROWS,
    add,
    add_rows,
    compiled,
    dot,
    dot_rows,
    exp,
    exponentials,
    get,
    largest_of,
    put,
    scale,
    widen,
)

__all__ = ["are_finite", "attend", "attend_groups", "attend_memory", "attend_suffix", "finish", "start"]

_TILE = 64
"""Tokens whose logits are held at once."""


@compiled
def start(largest: Any, total: Any, out: Any) -> None:
    """An attention that has seen no token: largest, total (g,), out (g, d) in fp32."""
    for a in range(len(total)):
        largest[a] = LOWEST
        total[a] = np.float32(0.0)
        for i in range(out.shape[1]):
            out[a, i] = np.float32(0.0)


@compiled
def attend(
    q: Any, keys: Any, values: Any, k_at: Any, v_at: Any, stride: Any, each: Any, chosen: Any, softcap: Any,
    largest: Any, total: Any, out: Any,
) -> None:  # fmt: skip
    """Go on with an attention of q (g, d), scaled, over runs of `each` tokens.

    Of run j token t has its K at element k_at[j] + t·stride of `keys` and its V at v_at[j] + t·stride of `values`, both
    flat; stride d, or 2d where V lies right behind K in the same array. chosen (runs, each) bool: which tokens count;
    (0, 0): all. softcap 0: none. largest, total, out: what `start` and earlier calls left; out is not divided by total
    yet.
    """
    group, dim = q.shape
    flat, flat_out, together = q.reshape(-1), out.reshape(-1), stride == 2 * dim
    behind = dim if together else 0
    tile, logits = np.empty(_TILE * stride, np.float32), np.empty((group, _TILE), np.float32)
    weights, masked = logits.reshape(-1), len(chosen) > 0
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
            widen(keys, k_at[run] + begin * stride, tile, 0, (size - 1) * stride + dim + behind)
            fours = size // ROWS * ROWS
            for t in range(0, fours, ROWS):
                for a in range(group):
                    one, two, three, four = dot_rows(flat, a * dim, tile, t * stride, stride, dim)
                    place = a * _TILE + t
                    put(weights, place, one)
                    put(weights, place + 1, two)
                    put(weights, place + 2, three)
                    put(weights, place + 3, four)
            for t in range(fours, size):
                for a in range(group):
                    put(weights, a * _TILE + t, dot(flat, a * dim, tile, t * stride, dim))
            if taken < size:
                for t in range(size):
                    if not chosen[run, begin + t]:
                        for a in range(group):
                            put(weights, a * _TILE + t, LOWEST)
            for a in range(group):
                own = logits[a, :size]
                if softcap > 0:
                    for t in range(size):
                        if own[t] > LOWEST:
                            own[t] = softcap * np.float32(math.tanh(own[t] / softcap))
                most = largest_of(own, largest[a])
                kept = exp(max(largest[a] - most, np.float32(-88.0)))
                scale(kept, out[a])
                total[a] = total[a] * kept + exponentials(own, most)
                largest[a] = most
            if not together:
                widen(values, v_at[run] + begin * stride, tile, 0, (size - 1) * stride + dim)
            rows = 0 if taken < size else size // ROWS * ROWS
            for t in range(0, rows, ROWS):
                for a in range(group):
                    add_rows(weights, a * _TILE + t, tile, t * stride + behind, stride, flat_out, a * dim, dim)
            for t in range(rows, size):
                if masked and not chosen[run, begin + t]:
                    continue
                for a in range(group):
                    add(get(weights, a * _TILE + t), tile, t * stride + behind, flat_out, a * dim, dim)


@compiled
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
        scale(scaling, wide.reshape(-1))
        start(largest, total, out[head])
        keys, values = suffixes[0, layer, head].reshape(-1), suffixes[1, layer, head].reshape(-1)
        attend(wide, keys, values, start_at, start_at, dim, tokens, every, softcap, largest, total, out[head])
        finish(sinks[head] if len(sinks) else mean[:0], alpha, mean, largest, total, out[head])


@compiled
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


@compiled
def attend_suffix(
    q: Any, keys: Any, values: Any, chosen: Any, softcap: Any, sinks: Any, alpha: Any, v_mean: Any, largest: Any,
    total: Any, out: Any,
) -> None:  # fmt: skip
    """End an attention of q (g, d) with the tokens in memory, flat in keys and values: `attend`, then `finish`.

    chosen (1, tokens): which count; (0, 0): all.
    """
    tokens = len(keys) // q.shape[1]
    if tokens:
        start_at = np.zeros(1, np.int64)
        attend(q, keys, values, start_at, start_at, q.shape[1], tokens, chosen, softcap, largest, total, out)
    finish(sinks, alpha, v_mean, largest, total, out)


@compiled
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
