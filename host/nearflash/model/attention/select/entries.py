"""Reference of the page scorer: logits to the entries of the selection (docs/contracts/attention.md, 1, "Mass")."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.fixed_point import LOGIT_LSB, MASS_GUARD_BITS
from nearflash.model.attention.numerics.exp2 import significand

__all__ = ["MAX_FRACTION_BITS", "Entries", "entries"]

MAX_FRACTION_BITS = 8
"""Fraction bits of an entry's largest logit."""


@dataclass(frozen=True)
class Entries:
    """Entries of one head's g query heads, E each."""

    x_max: NDArray[np.int64]
    """Largest logit, least bit 2^-8, (g, E)."""
    mass: NDArray[np.int64]
    """Sum of 2^x relative to 2^floor(largest), over the tokens an entry can hold; least bit 2^-14, (g, E)."""


def entries(logits: NDArray[np.int64], entry_tokens: int) -> Entries:
    """Entries of `entry_tokens` tokens (n, or 1) from logits (g, S), least bit 2^-16; the last entry may be partial."""
    group, tokens = logits.shape
    count = -(-tokens // entry_tokens)
    padded = np.zeros((group, count * entry_tokens), np.int64)
    padded[:, :tokens] = logits
    valid = np.arange(count * entry_tokens).reshape(count, entry_tokens) < tokens
    x = padded.reshape(group, count, entry_tokens)
    x_max = np.where(valid, x, np.iinfo(np.int64).min).max(axis=2) >> (-LOGIT_LSB - MAX_FRACTION_BITS)
    below = (x_max >> MAX_FRACTION_BITS)[..., None] - (x >> -LOGIT_LSB)
    terms = significand(x & (1 << -LOGIT_LSB) - 1).astype(np.int64) << MASS_GUARD_BITS
    terms = np.where(valid, terms >> np.clip(below, 0, 63), 0)
    return Entries(x_max, terms.sum(axis=2) >> (entry_tokens - 1).bit_length())
