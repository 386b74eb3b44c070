"""The attention modes of the attend kernel in torch: decode attention for many query positions at once, in fp32.

    q ─► dims ─► approximate logits ─► entries ─► chosen tokens ─► attention ─► alpha·out + (1 - alpha)·mean V

Each query position sees the tokens up to it, and chooses for itself. The numbers are those of
docs/contracts/attention.md, 1, without its rounding to fixed point; selections differ from a device's only where keys
nearly tie. Query heads of one KV head share dims and tokens.

`torch.ops.nearflash.attend` is the same for one query position.

Letters: N KV heads (of any batch), P query positions, g query heads of a KV head, S tokens, d head dimension.
Source: InstInfer (arXiv 2409.04992), SparQ (arXiv 2312.04985).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nearflash.abi.attention.fixed_point import LOG2E
from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.errors import CommandError, ShapeError
from nearflash.inference.policy.policy import AttentionMode, AttentionPolicy
from nearflash.inference.sparse.index import index_keys
from nearflash.inference.sparse.selection import choose, logit_scales, top_dims
from nearflash.storage.kv import KvLayout

__all__ = [
    "PROBABILITY_KEY",
    "Scan",
    "SparseOutput",
    "approximate_logits",
    "attend_chosen",
    "attend_mixed",
    "choose_tokens",
    "scan_of",
    "sparse_attention",
]

PROBABILITY_KEY = 4096.0
"""Factor from summed probabilities to keys."""


@dataclass(frozen=True)
class SparseOutput:
    """Attention of N KV heads at P query positions."""

    out: Tensor
    """(N, P, g, d) fp32."""
    chosen: Tensor
    """Tokens attended to, (N, P, S) bool."""
    score_dims: Tensor
    """Dims of the approximate score, (N, P, d) bool; none in dense attention."""


@dataclass(frozen=True)
class Scan:
    """How entries are chosen: scalars that hold for all heads and positions of a call."""

    score_dims: int
    local_window: int
    top_p: int
    by_probability: bool
    entry_tokens: int
    block_tokens: int
    form: IndexFormat
    keep_tail: bool = False


def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, tokens: Tensor, policy: AttentionPolicy, layout: KvLayout,
    scaling: float | None = None,
) -> SparseOutput:  # fmt: skip
    """Attend with q (N, P, g, d) to k and v (N, S, d); tokens (P,): how many of the S each position sees.

    k and v count as stored: rounded to fp16. `policy` without its overrides; `scaling` is softmax's, by default
    1/sqrt(d). Raises ShapeError for shapes that do not fit together, CommandError for score_dims above d.
    """
    _check(q, k, v, tokens)
    dim = q.shape[-1]
    scaling = dim**-0.5 if scaling is None else scaling
    resolved = [policy.resolve(int(count), dim, layout) for count in tokens]
    scan = scan_of(policy, dim, layout)
    top_k = torch.tensor([policy.top_k for policy in resolved], device=q.device)
    return _attend(q, k, v, tokens, top_k, scan, scaling)


def scan_of(policy: AttentionPolicy, dim: int, layout: KvLayout) -> Scan | None:
    """How `policy` (without its overrides) chooses; None: it is dense.

    Raises CommandError for score_dims above dim, and for kvswap, which chooses by predicted queries (kvswap.py).
    """
    if policy.mode is AttentionMode.DENSE:
        return None
    if policy.mode is AttentionMode.KVSWAP:
        raise CommandError("mode must be one that chooses by q itself, not kvswap: it needs the layer before")
    resolved = policy.resolve(1, dim, layout)
    return Scan(
        resolved.score_dims, policy.local_window, resolved.top_p, policy.by_probability,
        policy.entry_tokens(layout), layout.block_tokens, layout.index_format, policy.keep_tail,
    )  # fmt: skip


def attend_chosen(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, scaling: float) -> Tensor:
    """Softmax attention of q (N, P, g, d) over the `chosen` (N, P, S) of k and v (N, S, d): (N, P, g, d)."""
    scores = _scores(q * scaling, k).masked_fill_(~chosen.unsqueeze(2), -torch.inf)
    return _values(scores.softmax(dim=-1), v)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, tokens: Tensor, top_k: Tensor, scan: Scan | None, scaling: float
) -> SparseOutput:
    k, v = k.half(), v.half()
    valid = torch.arange(k.shape[1], device=k.device) < tokens.unsqueeze(-1)  # (P, S) or (N, P, S)
    if scan is None:
        chosen = valid.expand(q.shape[0], -1, -1)
        no_dims = torch.zeros(q.shape[:2] + q.shape[-1:], dtype=torch.bool, device=q.device)
        return SparseOutput(attend_chosen(q, k.float(), v.float(), chosen, scaling), chosen, no_dims)
    dims, logits = approximate_logits(q, k, tokens, scan, scaling)
    probabilities = logits.softmax(dim=-1)
    chosen = choose_tokens(logits, probabilities, tokens, top_k, scan) & valid
    return SparseOutput(attend_mixed(q, k, v, probabilities, chosen, tokens, scaling), chosen, dims)


def attend_mixed(
    q: Tensor, k: Tensor, v: Tensor, probabilities: Tensor, chosen: Tensor, tokens: Tensor, scaling: float
) -> Tensor:
    """`attend_chosen`, and the mean of V for what approximate `probabilities` (N, P, g, S) give the other tokens."""
    alpha = probabilities @ chosen.float().unsqueeze(-1)
    out = attend_chosen(q, k.float(), v.float(), chosen, scaling)
    return alpha * out + (1 - alpha) * _running_mean(v, tokens).unsqueeze(2)


def _running_mean(v: Tensor, tokens: Tensor) -> Tensor:
    """Mean of the V (N, S, d) that each position sees, (N, P, d)."""
    last = (tokens - 1).expand(len(v), -1).unsqueeze(-1).expand(-1, -1, v.shape[-1])
    return (v.double().cumsum(dim=1).gather(1, last) / tokens.unsqueeze(-1)).float()


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """q·K, (N, P, g, S)."""
    return (q.flatten(1, 2) @ k.transpose(1, 2)).unflatten(1, q.shape[1:3])


def _values(weights: Tensor, v: Tensor) -> Tensor:
    """Weights (N, P, g, S) times v (N, S, d)."""
    return (weights.flatten(1, 2) @ v).unflatten(1, weights.shape[1:3])


def approximate_logits(q: Tensor, k: Tensor, tokens: Tensor, scan: Scan, scaling: float) -> tuple[Tensor, Tensor]:
    """Dims (N, P, d) bool, and logits over them (N, P, g, S): whole blocks from the index, the unindexed suffix from K.

    -inf for the tokens that a position does not see; k is fp16.
    """
    dims = top_dims(q, scan.score_dims)
    part = q * logit_scales(q, dims, scaling).unsqueeze(-1) * dims.unsqueeze(2)
    scores = _scores(part, index_keys(k, scan.block_tokens, scan.form))
    position = torch.arange(k.shape[1], device=k.device)
    covered = tokens // scan.block_tokens * scan.block_tokens
    first, hidden = int(covered.min()), int(tokens.min())
    if scan.form is not IndexFormat.FP16 and first < k.shape[1]:
        suffix = (position[first:] >= covered.unsqueeze(-1)).unsqueeze(-2)  # (P, 1, S - first) or (N, P, 1, S - first)
        scores[..., first:] = torch.where(suffix, _scores(part, k[:, first:].float()), scores[..., first:])
    scores[..., hidden:].masked_fill_((position[hidden:] >= tokens.unsqueeze(-1)).unsqueeze(-2), -torch.inf)
    return dims, scores


def choose_tokens(logits: Tensor, probabilities: Tensor, tokens: Tensor, top_k: Tensor, scan: Scan) -> Tensor:
    """Tokens that are read, (N, P, S) bool; a chosen group's tokens all, and places after S = `tokens` with them.

    logits (N, P, g, S) are -inf after S, probabilities their softmax; tokens and top_k (P,) or (N, P).
    """
    size = scan.entry_tokens
    space = -logits.shape[-1] % size
    if scan.by_probability:
        shares = torch.nn.functional.pad(probabilities.sum(dim=2), (0, space)).unflatten(-1, (-1, size)).sum(dim=-1)
        keys = (shares * PROBABILITY_KEY).half().float()
    else:
        padded = torch.nn.functional.pad(logits * LOG2E, (0, space), value=-torch.inf)
        keys = padded.unflatten(-1, (-1, size)).amax(dim=-1).sum(dim=2).half().float()
    weights = keys
    entry = torch.arange(keys.shape[-1], device=keys.device) * size
    count = tokens.unsqueeze(-1)
    window = (count % scan.block_tokens).clamp(min=scan.local_window) if scan.keep_tail else scan.local_window
    local = entry + size > (count - window).clamp(min=0)
    keys = keys.masked_fill(local, torch.inf).masked_fill(entry >= count, -torch.inf)
    mask = choose(keys, top_k.expand(keys.shape[:-1]), weights, scan.top_p)
    return mask.repeat_interleave(size, dim=-1)[..., : logits.shape[-1]]


def _check(q: Tensor, k: Tensor, v: Tensor, tokens: Tensor) -> None:
    heads, positions, _, dim = q.shape if q.dim() == 4 else (0, 0, 0, 0)
    if q.dim() != 4 or k.shape != v.shape or k.dim() != 3 or k.shape[0] != heads or k.shape[2] != dim:
        raise ShapeError(
            "q must be (heads, positions, group, dim) and k, v (heads, tokens, dim), "
            f"not {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if tokens.shape[-1:] != (positions,) or int(tokens.min()) < 1 or int(tokens.max()) > k.shape[1]:
        raise ShapeError(f"tokens must be 1 to {k.shape[1]} for each of {positions} positions, not {tokens!r}")


@torch.library.custom_op("nearflash::attend", mutates_args=())
def _attend_op(
    q: Tensor, k: Tensor, v: Tensor, tokens: Tensor, top_k: Tensor, score_dims: int, local_window: int, top_p: int,
    by_probability: bool, entry_tokens: int, block_tokens: int, index_format: int, scaling: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One query position: q (N, g, d), k and v (N, S, d), tokens and top_k (N,); out (N, g, d), chosen (N, S).

    score_dims 0: dense. Numbers as an AttentionPolicy gives them, `index_format` an IndexFormat.
    """
    scan = Scan(score_dims, local_window, top_p, by_probability, entry_tokens, block_tokens, IndexFormat(index_format))
    done = _attend(
        q.float().unsqueeze(1), k, v, tokens.unsqueeze(-1), top_k.unsqueeze(-1), scan if score_dims else None, scaling
    )
    return done.out.squeeze(1).to(q.dtype), done.chosen.squeeze(1).clone()


@_attend_op.register_fake
def _(q: Tensor, k: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), k.new_empty(k.shape[:2], dtype=torch.bool)
