"""Scores and attention on a GPU, in Triton; under its interpreter (TRITON_INTERPRET=1) on the CPU, too.

Letters: n rows (KV heads of a sequence), g query heads of a KV head, d head dimension, r dims of the score, S tokens, T
tokens of an index block. Tensors are contiguous, and all on one device.
Source: online softmax over parts that are joined afterwards, Flash-Decoding (Dao et al., 2023).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["Partial", "attend_runs", "joined", "score_index"]

Partial = tuple[Tensor, Tensor, Tensor]
"""Of an attention to some of the tokens: largest logit and sum of exponentials (n, splits, g), and outputs (…, d)."""
_LOWEST = tl.constexpr(-1e30)
_TILE = 32
"""Tokens whose logits are held at once."""
_BYTES = 256
"""Codes of a row that a program scores."""
_PROGRAMS = 512
"""Wanted at least: rows are split among several where there are fewer."""
_DOT_ROWS = 16
"""The fewest that tl.dot takes."""


def score_index(q: Tensor, dims: Tensor, codes: Tensor, factors: Tensor, heads: Tensor, bits: int) -> Tensor:
    """Scores (n, g, B·T) of the tokens of whole index blocks: q (n, g, d) fp32 over the dims (n, r) int64 of each row.

    codes (H, B, d, T·bits/8) uint8 and factors (H, B, d, 2) fp16 as IndexRows has them; heads (n,) int64: of each row.
    """
    rows, group, dim = q.shape
    _, blocks, lines, length = codes.shape
    tokens, wide = length * 8 // bits, codes.view(torch.float16) if bits == 16 else codes
    size = wide.shape[-1]
    scores = torch.empty(rows, group, blocks * tokens, device=q.device)
    grid = rows, blocks, triton.cdiv(size, _BYTES)
    _score[grid](
        q, dims, wide, factors, heads, scores, blocks, lines, size, tokens, dims.shape[1], dim, group,
        BITS=bits, GROUP=triton.next_power_of_2(group), CODES=_BYTES,
    )  # fmt: skip
    return scores


def attend_runs(
    q: Tensor, data: Tensor, k_at: Tensor, first: Tensor, counts: Tensor, each: int, v_from: int, stride: int,
    chosen: Tensor | None, softcap: float,
) -> Partial:  # fmt: skip
    """Attention of q (n, g, d) fp32, scaled, to runs of `each` tokens whose K and V lie in `data`, flat, fp16.

    Of run j of row i token t has its K at element k_at[i, j] + t·stride, V `v_from` behind it, and is token first[i, j]
    + t of the sequence; k_at, first (n, R) and counts (n,) int64. chosen (n, S) bool: which tokens count; None: all.
    softcap 0: none.
    """
    rows, group, dim = q.shape
    splits = max(min(k_at.shape[1], triton.cdiv(_PROGRAMS, rows)), 1)
    largest, total = (torch.empty(rows, splits, group, device=q.device) for _ in range(2))
    out = torch.empty(rows, splits, group, dim, device=q.device)
    masks = counts if chosen is None else chosen.view(torch.uint8)
    tokens = 0 if chosen is None else chosen.shape[1]
    _attend[rows, splits](
        q, data, k_at, first, counts, masks, largest, total, out, v_from, stride, each, tokens, softcap,
        k_at.shape[1], dim, group, GROUP=max(triton.next_power_of_2(group), _DOT_ROWS),
        DIM=max(triton.next_power_of_2(dim), _DOT_ROWS), TILE=_TILE, MASKED=chosen is not None, CAPPED=softcap > 0,
    )  # fmt: skip
    return largest, total, out


def joined(parts: list[Partial]) -> tuple[Tensor, Tensor]:
    """Attention to the tokens of all parts, (n, g, d), and the logarithm of the sum of all exponentials, (n, g)."""
    largest, total, out = (torch.cat(each, dim=1) for each in zip(*parts, strict=True))
    most = largest.amax(dim=1, keepdim=True)
    kept = (largest - most).exp()
    every = (total * kept).sum(dim=1)
    return (out * kept.unsqueeze(-1)).sum(dim=1) / every.unsqueeze(-1), every.log() + most[:, 0]


@triton.jit
def _score(  # type: ignore[no-untyped-def]
    q, dims, codes, factors, heads, scores, blocks, lines, size,
    tokens, count, dim, group, BITS: tl.constexpr, GROUP: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0), tl.program_id(1)
    at = tl.program_id(2) * CODES + tl.arange(0, CODES)
    own = tl.arange(0, GROUP)
    first_line = (tl.load(heads + row) * blocks + block) * lines
    low = tl.zeros((GROUP, CODES), tl.float32)
    high = tl.zeros((GROUP, CODES), tl.float32)
    for j in range(count):
        line = tl.load(dims + row * count + j)
        weight = tl.load(q + (row * group + own) * dim + line, mask=own < group, other=0.0)
        code = tl.load(codes + (first_line + line) * size + at, mask=at < size, other=0)
        if BITS == 16:
            low += weight[:, None] * code.to(tl.float32)[None, :]
        else:
            scale = tl.load(factors + 2 * (first_line + line)).to(tl.float32)
            zero = tl.load(factors + 2 * (first_line + line) + 1).to(tl.float32)
            if BITS == 4:
                high += weight[:, None] * ((code >> 4).to(tl.float32) * scale + zero)[None, :]
                code = code & 15
            low += weight[:, None] * (code.to(tl.float32) * scale + zero)[None, :]
    each = 2 if BITS == 4 else 1
    place = scores + ((row * group + own) * blocks + block)[:, None] * tokens + each * at[None, :]
    inside = (own < group)[:, None] & (at < size)[None, :]
    tl.store(place, low, mask=inside)
    if BITS == 4:
        tl.store(place + 1, high, mask=inside)


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q, data, k_at, first, counts, masks, largest, total, out, v_from,
    stride, each, tokens, softcap, runs, dim, group, GROUP: tl.constexpr,
    DIM: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    row, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    own, places, near = tl.arange(0, GROUP), tl.arange(0, DIM), tl.arange(0, TILE)
    inside = (own < group)[:, None] & (places < dim)[None, :]
    query = tl.load(q + (row * group + own)[:, None] * dim + places[None, :], mask=inside, other=0.0)
    most = tl.full((GROUP,), _LOWEST, tl.float32)
    every = tl.zeros((GROUP,), tl.float32)
    sums = tl.zeros((GROUP, DIM), tl.float32)
    for run in range(split, tl.load(counts + row), splits):
        start = tl.load(k_at + row * runs + run)
        token = tl.load(first + row * runs + run)
        for begin in range(0, each, TILE):
            t = begin + near
            live = t < each
            if MASKED:
                live = live & (tl.load(masks + row * tokens + token + t, mask=live, other=0) != 0)
            words = start + t[:, None] * stride + places[None, :]
            there = live[:, None] & (places < dim)[None, :]
            keys = tl.load(data + words, mask=there, other=0.0).to(tl.float32)
            logits = tl.dot(query, tl.trans(keys), input_precision="ieee")
            if CAPPED:
                logits = softcap * (1.0 - 2.0 / (tl.exp(2.0 * logits / softcap) + 1.0))
            logits = tl.where(live[None, :], logits, _LOWEST)
            now = tl.maximum(most, tl.max(logits, axis=1))
            weights = tl.where(live[None, :], tl.exp(logits - now[:, None]), 0.0)
            kept = tl.exp(most - now)
            values = tl.load(data + words + v_from, mask=there, other=0.0).to(tl.float32)
            sums = sums * kept[:, None] + tl.dot(weights, values, input_precision="ieee")
            every = every * kept + tl.sum(weights, axis=1)
            most = now
    place = (row * splits + split) * group + own
    tl.store(largest + place, most, mask=own < group)
    tl.store(total + place, every, mask=own < group)
    tl.store(out + place[:, None] * dim + places[None, :], sums, mask=inside)
