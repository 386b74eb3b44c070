"""Fixed-point formats of the attend kernel: widths in bits and least bits as powers of two
(docs/contracts/attention.md, 1)."""

__all__ = [
    "EXACT_LSB",
    "KEY_LOCAL",
    "LOG2E",
    "LOGIT_BITS",
    "LOGIT_LSB",
    "MASS_BITS",
    "MASS_GUARD_BITS",
    "MAX_LOGIT_BITS",
    "PV_BITS",
    "QK_BITS",
    "REFERENCE_HEADROOM",
    "SCALE_LEAST_LOG2",
    "SCALE_LIMIT_LOG2",
    "SCORE_BITS",
    "SCORE_LSB",
    "TERM_BITS",
    "WEIGHT_BITS",
    "score_limit_log2",
]

EXACT_LSB = -48
"""Least bit of exact sums of fp16 products."""
QK_BITS = 90
"""Width of the exact sum q·K, for d up to 256."""
PV_BITS = 98
"""Width of the exact sum p·V, for up to 2^17 tokens."""
SCORE_LSB = -16
SCORE_BITS = 36
LOGIT_LSB = -16
LOGIT_BITS = 28
LOG2E = 1.4426950408889634
"""log2(e): logits are to the base 2."""
SCALE_LEAST_LOG2, SCALE_LIMIT_LOG2 = -14, 8
"""Factors from score to logit lie in [2^-14, 2^8)."""
MAX_LOGIT_BITS = 20
"""Width of an entry's largest logit, of which 8 are fraction bits."""
MASS_BITS = 16
MASS_GUARD_BITS = 4
TERM_BITS = 32
"""Width of an entry's mass relative to the head's largest."""
WEIGHT_BITS = 28
"""Width of an entry's weight, the sum of probabilities over the group times 2^24."""
KEY_LOCAL = 0xFFFF
"""Key of an entry in the local window: above every number."""
REFERENCE_HEADROOM = 8
"""Binades by which a logit may pass the reference before its weight overflows fp16."""


def score_limit_log2(score_dims: int) -> int:
    """log2 of the limit of docs/contracts/attention.md, "range rule", for r = `score_dims` (1 to 256)."""
    return SCORE_BITS - 1 + SCORE_LSB - 1 - (score_dims - 1).bit_length()
