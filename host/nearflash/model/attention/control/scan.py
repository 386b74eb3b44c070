"""The scan of one head: dims of the approximate score, scores, their factors to logits
(docs/contracts/attention.md, 1)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.faults import Fault
from nearflash.abi.attention.fixed_point import SCORE_LSB, score_limit_log2
from nearflash.abi.attention.pages import IndexFormat
from nearflash.model.attention.memory.finite import finite
from nearflash.model.attention.memory.index import IndexBlock, QuantisedBlock
from nearflash.model.attention.numerics.fp16 import order_key
from nearflash.model.attention.numerics.product import exceeds, multiply_rounded, multiply_truncated
from nearflash.model.attention.select.select import select
from nearflash.model.fp.div import div
from nearflash.model.fp.mul import mul
from nearflash.model.fp.sqrt import sqrt

__all__ = ["approximate_scores", "logit_scales", "top_dims"]

F16 = NDArray[np.float16]
Scores = tuple[NDArray[np.int64], Fault]
_FACTOR_LSB = {IndexFormat.INT8: -14, IndexFormat.INT4: -10}
_FACTOR_BITS = 18


def top_dims(q: F16, count: int) -> NDArray[np.int64]:
    """The `count` dims with the largest sum of |q| (g, d) over the heads, ascending; lower index first in ties."""
    sums = np.abs(q.astype(np.float64)).sum(axis=0)  # exact: multiples of 2^-24 below 2^20
    return np.flatnonzero(select(order_key((sums / 8).astype(np.float16)), count))


def logit_scales(q: F16, dims: NDArray[np.int64], scale: float) -> NDArray[np.float32]:
    """Factors c_h (g,) from approximate scores to logits: `scale` corrected for the share of |q| in the dims."""
    magnitude = np.abs(q.astype(np.float64))
    every, chosen = (part.sum(axis=1).astype(np.float32) for part in (magnitude, magnitude[:, dims]))
    plain = np.full(len(q), scale, np.float32)
    ratio, _ = div(every.view(np.uint32), chosen.view(np.uint32))
    corrected, _ = mul(plain.view(np.uint32), sqrt(ratio)[0])
    return np.where(chosen > 0, corrected.view(np.float32), plain)


def approximate_scores(q: F16, blocks: Sequence[IndexBlock], suffix: F16) -> Scores:
    """Scores (g, S), least bit 2^-16, of finite q (g, r), and the faults.

    r dims are those of the score, in q, in the blocks of the index and in the K of the tokens after them (t, r).
    """
    parts = [_codes(q, block) if isinstance(block, QuantisedBlock) else _cut(q, block) for block in (*blocks, suffix)]
    faults = Fault(0)
    for _, fault in parts:
        faults |= fault
    return np.concatenate([scores for scores, _ in parts], axis=1), faults


def _cut(q: F16, k: F16) -> Scores:
    """Sums of products of q (g, r) and k (t, r), each cut toward zero."""
    (k,), faults = finite(k)
    scores = np.zeros((len(q), len(k)), np.int64)
    for query, key in zip(q.T, k.T, strict=True):
        scores += multiply_truncated(query[:, None], key)
        faults |= _range(exceeds(query[:, None], key, q.shape[1]))
    return scores, faults


def _codes(q: F16, index: QuantisedBlock) -> Scores:
    """Scores of one block from its quantised index."""
    form, lsb = index.format, _FACTOR_LSB[index.format]
    (scale, zero), faults = finite(index.scale, index.zero)
    factors, offsets = multiply_rounded(q, scale, lsb), multiply_rounded(q, zero, SCORE_LSB)
    limit, half = 2 ** score_limit_log2(q.shape[1]), 1 << _FACTOR_BITS - 1
    faults |= _range(np.abs(offsets) >= limit << -SCORE_LSB)
    faults |= _range(np.abs(factors) << form.bits >= limit << -lsb)
    faults |= _range((factors < -half) | (factors >= half))
    products = factors.astype(np.float64) @ index.codes.T.astype(np.float64)  # exact: integers below 2^53
    return (products.astype(np.int64) << lsb - SCORE_LSB) + offsets.sum(axis=1, keepdims=True), faults


def _range(outside: NDArray[np.bool_]) -> Fault:
    return Fault.SCORE_RANGE if outside.any() else Fault(0)
