"""The gather of one head: exact scores and weights of the chosen tokens, exact sums, output
(docs/contracts/attention.md, 1)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.faults import Fault
from nearflash.abi.attention.fixed_point import EXACT_LSB, LOGIT_BITS, LOGIT_LSB, REFERENCE_HEADROOM
from nearflash.model.attention.memory.finite import finite
from nearflash.model.attention.numerics.dot import exact_dot, exact_sum
from nearflash.model.attention.numerics.logit import to_logit
from nearflash.model.attention.numerics.raw import to_fp32
from nearflash.model.attention.numerics.score import to_score
from nearflash.model.attention.numerics.weight import to_weight
from nearflash.model.fp.convert import to_fp16
from nearflash.model.fp.muladd import fma

__all__ = ["Gathered", "finish", "gather"]

F16 = NDArray[np.float16]
F32 = NDArray[np.float32]
_LEAST = -1 << LOGIT_BITS - 1 >> -LOGIT_LSB
"""Floor of the least logit: the maximum of no tokens."""


@dataclass(frozen=True)
class Gathered:
    """The exact sums of a head, as the channels' partial sums add up."""

    denominator: NDArray[np.object_]
    """l, (g,), Python integers in units of 2^-48."""
    numerator: NDArray[np.object_]
    """N, (g, d), likewise."""
    maximum: tuple[int, ...]
    """Floor of the largest logit, by head."""
    faults: Fault
    """REFERENCE_LOW only beside no fault but REFERENCE_HIGH."""


def gather(q: F16, k: F16, v: F16, scale: float, reference: tuple[int, ...]) -> Gathered:
    """Sums over the chosen tokens' k and v (|J|, d) for q (g, d), weights relative to 2^reference[h]."""
    whole, faults = finite(q, k, v)
    q, k, v = whole
    scores, outside = to_score(exact_dot(q, k.T))
    logits, saturated = to_logit(scores, scale)
    top = np.array(reference)
    weights, high = to_weight(logits, top[:, None])
    maximum = (logits >> -LOGIT_LSB).max(axis=1, initial=_LEAST)
    if outside.any() or saturated.any():
        faults |= Fault.SCORE_RANGE
    low = not faults and bool((maximum < top - REFERENCE_HEADROOM).any())
    faults |= (Fault.REFERENCE_HIGH if high.any() else Fault(0)) | (Fault.REFERENCE_LOW if low else Fault(0))
    return Gathered(exact_sum(weights), exact_dot(weights, v), tuple(maximum.tolist()), faults)


def finish(gathered: Gathered, alpha: F32, v_mean: F32) -> F16:
    """Output (g, d): N / l weighted with alpha (g,), and v_mean (d,) with the rest."""
    numerator, denominator = (to_fp32(x, EXACT_LSB) for x in (gathered.numerator, gathered.denominator))
    share = alpha[:, None]
    with np.errstate(all="ignore"):
        attended = numerator / denominator[:, None]
        mixed = fma(np.float32(1) - share, v_mean, share * attended)
    return to_fp16(np.where(share == 1, attended, mixed)).view(np.float16)
