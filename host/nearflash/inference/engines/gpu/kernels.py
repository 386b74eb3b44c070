"""Scores and attention on a GPU, in Triton; under its interpreter (TRITON_INTERPRET=1) on the CPU, too.

Letters: n rows (KV heads of any sequences), g query heads of a KV head, d head dimension, r dims of the score, S tokens
of the longest row, T tokens of an index block. Tensors are contiguous, and all on one device. What is stored lies in
many tensors: it is given by addresses, int64, which must stay valid until what was begun here is done.
Source: online softmax over parts that are joined afterwards, Flash-Decoding (Dao et al., 2023).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["Partial", "attend_runs", "entry_keys", "join_parts", "score_index", "score_keys", "score_query"]

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
_ENTRY_TOKENS = 1024
"""Tokens whose entries a program sums up."""


def score_query(q: Tensor, count: int, scaling: float) -> tuple[Tensor, Tensor]:
    """The query of scores: q (n, g, d) fp32 in the dims that count, scaled, and those dims (n, count) int64.

    They are selection.top_dims and logit_scales.
    """
    rows, group, dim = q.shape
    part, dims = torch.empty_like(q), torch.empty(rows, count, dtype=torch.int64, device=q.device)
    _query[(rows,)](
        q, part, dims, scaling, count, dim, group, GROUP=triton.next_power_of_2(group),
        DIM=triton.next_power_of_2(dim),
    )  # fmt: skip
    return part, dims


def score_index(
    q: Tensor, dims: Tensor, codes_at: Tensor, factors_at: Tensor, blocks: Tensor, block_tokens: int, bits: int,
    scores: Tensor,
) -> None:  # fmt: skip
    """Write the `scores` (n, g, S) of the tokens of each row's whole index blocks, (n,): its first ones.

    q (n, g, d) fp32 over the dims (n, r) int64 of each row. Of each row the addresses (n,) of its codes (B, d,
    T·bits/8) uint8 and factors (B, d, 2) fp16, as IndexRows has them.
    """
    rows, group, dim = q.shape
    words = block_tokens if bits == 16 else block_tokens * bits // 8
    grid = rows, scores.shape[2] // block_tokens, triton.cdiv(words, _BYTES)
    _score[grid](
        q, dims, codes_at, factors_at, blocks, scores, words, block_tokens, dims.shape[1], dim, group, scores.shape[2],
        BITS=bits, GROUP=triton.next_power_of_2(group), CODES=_BYTES,
    )  # fmt: skip


def score_keys(q: Tensor, k_at: Tensor, first: Tensor, counts: Tensor, most: int, scores: Tensor) -> None:
    """Write the `scores` (n, g, S) of each row's tokens first, first + 1, …, counts of them (n,), at `most` so many.

    q (n, g, d) fp32; k_at (n,): addresses of their K (u, d) fp16.
    """
    rows, group, dim = q.shape
    _score_keys[rows, triton.cdiv(most, _TILE)](
        q, k_at, first, counts, scores, dim, group, scores.shape[2], TILE=_TILE,
        GROUP=max(triton.next_power_of_2(group), _DOT_ROWS), DIM=max(triton.next_power_of_2(dim), _DOT_ROWS),
    )  # fmt: skip


def attend_runs(
    q: Tensor, k_at: Tensor, v_from: Tensor, first: Tensor, counts: Tensor, ends: Tensor, each: int, stride: int,
    chosen: Tensor | None, entry_tokens: int, softcap: float,
) -> Partial:  # fmt: skip
    """Attention of q (n, g, d) fp32, scaled, to runs of `each` tokens; a row's last one ends with its token ends (n,).

    Of run j of row i token t has its K at address k_at[i, j], t·stride elements of fp16 behind it, V v_from[i] elements
    behind that, and is token first[i, j] + t of the sequence; k_at, first (n, R), v_from and counts (n,), all int64.
    chosen (n, E) bool: which entries of `entry_tokens` each count; None: all. softcap 0: none.
    """
    rows, group, dim = q.shape
    splits = max(min(k_at.shape[1], triton.cdiv(_PROGRAMS, rows)), 1)
    largest, total = (torch.empty(rows, splits, group, device=q.device) for _ in range(2))
    out = torch.empty(rows, splits, group, dim, device=q.device)
    masks = counts if chosen is None else chosen.view(torch.uint8)
    entries = 0 if chosen is None else chosen.shape[1]
    _attend[rows, splits](
        q, k_at, v_from, first, counts, ends, masks, largest, total, out, stride, each, entries, entry_tokens, softcap,
        k_at.shape[1], dim, group, GROUP=max(triton.next_power_of_2(group), _DOT_ROWS),
        DIM=max(triton.next_power_of_2(dim), _DOT_ROWS), TILE=_TILE, MASKED=chosen is not None, CAPPED=softcap > 0,
    )  # fmt: skip
    return largest, total, out


def entry_keys(
    probabilities: Tensor, logits: Tensor | None, tokens: Tensor, windows: Tensor, entry_tokens: int, most: float
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Keys (n, E) of entries of `entry_tokens` each as sparse.attention.choose_tokens ranks them, the same without the
    window, and what of the `probabilities` (n, g, S) each entry has, (n, g, E).

    By the probabilities, `most` as the key of them all; or, where given, by `logits` (n, g, S), `most` as their factor.
    tokens, windows (n,) int64: of each row; the last `windows` tokens have keys of infinity.
    """
    rows, group, length = probabilities.shape
    count = triton.cdiv(length, entry_tokens)
    keys, plain = (torch.empty(rows, count, device=tokens.device) for _ in range(2))
    shares = torch.empty(rows, group, count, device=tokens.device)
    entry = triton.next_power_of_2(entry_tokens)
    at_once = max(_ENTRY_TOKENS // entry, 1)
    _entries[rows, triton.cdiv(count, at_once)](
        probabilities, probabilities if logits is None else logits, tokens, windows, keys, plain, shares, most, length,
        count, entry_tokens, group, ENTRIES=at_once, EACH=entry, BY_LOGIT=logits is not None,
    )  # fmt: skip
    return keys, plain, shares


def join_parts(parts: list[Partial]) -> tuple[Tensor, Tensor]:
    """Attention to the tokens of all parts, (n, g, d), and the logarithm of the sum of all exponentials, (n, g)."""
    largest, total, out = parts[0] if len(parts) == 1 else (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
    rows, splits, group, dim = out.shape
    every, log_sum = torch.empty(rows, group, dim, device=out.device), torch.empty(rows, group, device=out.device)
    _join[rows, group](
        largest, total, out, every, log_sum, splits, group, dim, SPLITS=triton.next_power_of_2(splits),
        DIM=triton.next_power_of_2(dim),
    )  # fmt: skip
    return every, log_sum


@triton.jit
def _query(  # type: ignore[no-untyped-def]
    q, part, dims, scaling, count, dim, group, GROUP: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    member, places = tl.arange(0, GROUP), tl.arange(0, DIM)
    words = q + (row * group + member)[:, None] * dim + places[None, :]
    inside = (member < group)[:, None] & (places < dim)[None, :]
    query = tl.load(words, mask=inside, other=0.0)
    size = tl.abs(query)
    # Rounded as the kernel ranks them; what is no dim comes last.
    sums = (tl.sum(size.to(tl.float64), axis=0) / 8).to(tl.float32).to(tl.float16).to(tl.float32)
    sums = tl.where(places < dim, sums, -1.0)
    rank = tl.zeros((DIM,), tl.int32)
    for other in range(dim):
        column = tl.load(q + (row * group + member) * dim + other, mask=member < group, other=0.0)
        its = (tl.sum(tl.abs(column).to(tl.float64), axis=0) / 8).to(tl.float32).to(tl.float16).to(tl.float32)
        rank += ((its > sums) | ((its == sums) & (other < places))).to(tl.int32)
    counts = (rank < count) & (places < dim)
    tl.store(dims + row * count + tl.cumsum(counts.to(tl.int32), 0) - 1, places.to(tl.int64), mask=counts)
    every, kept = tl.sum(size, axis=1), tl.sum(tl.where(counts[None, :], size, 0.0), axis=1)
    scale = scaling * tl.where(kept > 0, tl.sqrt(every / tl.where(kept > 0, kept, 1.0)), 1.0)
    out = tl.where(counts[None, :], query * scale[:, None], 0.0)
    tl.store(part + (row * group + member)[:, None] * dim + places[None, :], out, mask=inside)


@triton.jit
def _entries(  # type: ignore[no-untyped-def]
    probabilities, logits, tokens, windows, keys, plain, shares, most, length, count, each, group,
    ENTRIES: tl.constexpr, EACH: tl.constexpr, BY_LOGIT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    entry = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    token = entry[:, None] * each + tl.arange(0, EACH)[None, :]
    inside = (tl.arange(0, EACH) < each)[None, :] & (token < length)
    sums = tl.zeros((ENTRIES,), tl.float32)
    for member in range(group):
        words = (row * group + member) * length + token
        share = tl.sum(tl.load(probabilities + words, mask=inside, other=0.0), axis=1)
        tl.store(shares + (row * group + member) * count + entry, share, mask=entry < count)
        if BY_LOGIT:
            sums += tl.max(tl.load(logits + words, mask=inside, other=float("-inf")), axis=1)
        else:
            sums += share
    key = (sums * most).to(tl.float16).to(tl.float32)
    end = tl.load(tokens + row)
    tl.store(plain + row * count + entry, key, mask=entry < count)
    key = tl.where(entry * each + each > tl.maximum(end - tl.load(windows + row), 0), float("inf"), key)
    key = tl.where(entry * each >= end, float("-inf"), key)
    tl.store(keys + row * count + entry, key, mask=entry < count)


@triton.jit
def _join(  # type: ignore[no-untyped-def]
    largest, total, out, every, log_sum, splits, group, dim, SPLITS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    row, member = tl.program_id(0), tl.program_id(1)
    split, places = tl.arange(0, SPLITS), tl.arange(0, DIM)
    at = (row * splits + split) * group + member
    high = tl.load(largest + at, mask=split < splits, other=float("-inf"))
    most = tl.max(high, axis=0)
    kept = tl.exp(high - most)
    sum_all = tl.sum(kept * tl.load(total + at, mask=split < splits, other=0.0), axis=0)
    sums = tl.zeros((DIM,), tl.float32)
    for number in range(splits):
        at_one = (row * splits + number) * group + member
        weight = tl.exp(tl.load(largest + at_one) - most)
        sums += weight * tl.load(out + at_one * dim + places, mask=places < dim, other=0.0)
    tl.store(every + (row * group + member) * dim + places, sums / sum_all, mask=places < dim)
    tl.store(log_sum + row * group + member, tl.log(sum_all) + most)


@triton.jit
def _score(  # type: ignore[no-untyped-def]
    q, dims, codes_at, factors_at, blocks, scores, words,
    tokens, count, dim, group, length, BITS: tl.constexpr, GROUP: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0), tl.program_id(1)
    if block < tl.load(blocks + row):
        at = tl.program_id(2) * CODES + tl.arange(0, CODES)
        member = tl.arange(0, GROUP)
        factors = tl.load(factors_at + row).to(tl.pointer_type(tl.float16))
        if BITS == 16:
            codes = tl.load(codes_at + row).to(tl.pointer_type(tl.float16))
        else:
            codes = tl.load(codes_at + row).to(tl.pointer_type(tl.uint8))
        low = tl.zeros((GROUP, CODES), tl.float32)
        high = tl.zeros((GROUP, CODES), tl.float32)
        for j in range(count):
            line = tl.load(dims + row * count + j)
            weight = tl.load(q + (row * group + member) * dim + line, mask=member < group, other=0.0)
            line += block * dim
            code = tl.load(codes + line * words + at, mask=at < words, other=0)
            if BITS == 16:
                low += weight[:, None] * code.to(tl.float32)[None, :]
            else:
                scale = tl.load(factors + 2 * line).to(tl.float32)
                zero = tl.load(factors + 2 * line + 1).to(tl.float32)
                if BITS == 4:
                    high += weight[:, None] * ((code >> 4).to(tl.float32) * scale + zero)[None, :]
                    code = code & 15
                low += weight[:, None] * (code.to(tl.float32) * scale + zero)[None, :]
        step = 2 if BITS == 4 else 1
        target = scores + (row * group + member)[:, None] * length + block * tokens + step * at[None, :]
        inside = (member < group)[:, None] & (at < words)[None, :]
        tl.store(target, low, mask=inside)
        if BITS == 4:
            tl.store(target + 1, high, mask=inside)


@triton.jit
def _score_keys(  # type: ignore[no-untyped-def]
    q, k_at, first, counts, scores, dim,
    group, length, GROUP: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    member, places = tl.arange(0, GROUP), tl.arange(0, DIM)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    live = token < tl.load(counts + row)
    inside = (member < group)[:, None] & (places < dim)[None, :]
    query = tl.load(q + (row * group + member)[:, None] * dim + places[None, :], mask=inside, other=0.0)
    words = tl.load(k_at + row).to(tl.pointer_type(tl.float16)) + token[:, None] * dim + places[None, :]
    keys = tl.load(words, mask=live[:, None] & (places < dim)[None, :], other=0.0).to(tl.float32)
    products = tl.dot(query, tl.trans(keys), input_precision="ieee")
    target = scores + (row * group + member)[:, None] * length + tl.load(first + row) + token[None, :]
    tl.store(target, products, mask=(member < group)[:, None] & live[None, :])


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q, k_at, v_from, first, counts, ends, masks, largest, total, out,
    stride, each, entries, entry_tokens, softcap, runs, dim, group, GROUP: tl.constexpr,
    DIM: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    row, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    member, places, near = tl.arange(0, GROUP), tl.arange(0, DIM), tl.arange(0, TILE)
    inside = (member < group)[:, None] & (places < dim)[None, :]
    query = tl.load(q + (row * group + member)[:, None] * dim + places[None, :], mask=inside, other=0.0)
    behind, end = tl.load(v_from + row), tl.load(ends + row)
    most = tl.full((GROUP,), _LOWEST, tl.float32)
    every = tl.zeros((GROUP,), tl.float32)
    sums = tl.zeros((GROUP, DIM), tl.float32)
    for run in range(split, tl.load(counts + row), splits):
        start = tl.load(k_at + row * runs + run).to(tl.pointer_type(tl.float16))
        token = tl.load(first + row * runs + run)
        for begin in range(0, each, TILE):
            t = begin + near
            live = (t < each) & (token + t < end)
            if MASKED:
                entry = (token + t) // entry_tokens
                live = live & (tl.load(masks + row * entries + entry, mask=live, other=0) != 0)
            words = start + t[:, None] * stride + places[None, :]
            there = live[:, None] & (places < dim)[None, :]
            keys = tl.load(words, mask=there, other=0.0).to(tl.float32)
            logits = tl.dot(query, tl.trans(keys), input_precision="ieee")
            if CAPPED:
                logits = softcap * (1.0 - 2.0 / (tl.exp(2.0 * logits / softcap) + 1.0))
            logits = tl.where(live[None, :], logits, _LOWEST)
            now = tl.maximum(most, tl.max(logits, axis=1))
            weights = tl.where(live[None, :], tl.exp(logits - now[:, None]), 0.0)
            kept = tl.exp(most - now)
            values = tl.load(words + behind, mask=there, other=0.0).to(tl.float32)
            sums = sums * kept[:, None] + tl.dot(weights, values, input_precision="ieee")
            every = every * kept + tl.sum(weights, axis=1)
            most = now
    slot = (row * splits + split) * group + member
    tl.store(largest + slot, most, mask=member < group)
    tl.store(total + slot, every, mask=member < group)
    tl.store(out + slot[:, None] * dim + places[None, :], sums, mask=inside)
