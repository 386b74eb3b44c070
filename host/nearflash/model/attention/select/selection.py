"""Reference of the selection unit: entries to a mask, references and the sums of alpha (docs/contracts/attention.md,
1)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.fixed_point import KEY_LOCAL, MASS_BITS
from nearflash.model.attention.numerics.fp16 import order_key, to_fp16
from nearflash.model.attention.select.entries import MAX_FRACTION_BITS, Entries
from nearflash.model.attention.select.select import select, select_mass

__all__ = ["Selected", "logit_keys", "probabilities", "probability_keys", "references", "selection", "terms", "weights"]

Ints = NDArray[np.int64]
_VALUE_LSB = -12
"""Least bit of summed probabilities as they become fp16: what 2^24 stands for is 2^12."""
_RECIPROCAL_BITS = 16
_PROBABILITY_BITS = 24


@dataclass(frozen=True)
class Selected:
    """Result of one head's selection."""

    mask: NDArray[np.bool_]
    """(E,)."""
    references: tuple[int, ...]
    """top_h, by query head."""
    numerator: tuple[int, ...]
    """N_h."""
    denominator: tuple[int, ...]
    """L_h."""

    @property
    def alpha(self) -> NDArray[np.float32]:
        """fl32(fl32(N) / fl32(L)), (g,)."""
        return np.divide(np.array(self.numerator, np.float32), np.array(self.denominator, np.float32))


def references(entries: Entries) -> Ints:
    """top_h, (g,): floor of the largest logit."""
    return np.asarray(entries.x_max.max(axis=1) >> MAX_FRACTION_BITS)


def terms(entries: Entries) -> Ints:
    """Masses relative to 2^top_h, (g, E), 32 bits."""
    below = references(entries)[:, None] - (entries.x_max >> MAX_FRACTION_BITS)
    return (entries.mass << MASS_BITS) >> np.minimum(below, 63)


def logit_keys(entries: Entries) -> NDArray[np.uint16]:
    """Keys (E,) by the sum of the largest logits over the query heads."""
    return order_key(to_fp16(entries.x_max.sum(axis=0), -MAX_FRACTION_BITS))


def probabilities(entries: Entries) -> Ints:
    """Share of each entry in its query head's mass, summed over the query heads: v (E,), 2^24 a head."""
    shares = np.zeros(entries.x_max.shape[1], np.int64)
    for head in terms(entries):
        total = int(head.sum())
        bits = total.bit_length()
        reciprocal = ((1 << _RECIPROCAL_BITS - 1 + bits) - 1) // total
        shares += head * reciprocal >> (_RECIPROCAL_BITS - 1 + bits - _PROBABILITY_BITS)
    return shares


def probability_keys(probabilities: Ints) -> NDArray[np.uint16]:
    """Keys (E,) of summed probabilities."""
    return order_key(to_fp16(probabilities, _VALUE_LSB))


def weights(probabilities: Ints) -> Ints:
    """Weights (E,) for selection by mass: summed probabilities as their keys have them, rounded to fp16."""
    return np.ldexp(to_fp16(probabilities, _VALUE_LSB).astype(np.float64), -_VALUE_LSB).astype(np.int64)


def selection(entries: Entries, top_k: int, local_entry: int, *, probability: bool = False, mass: int = 0) -> Selected:
    """Choose at most `top_k` entries, those from `local_entry` on first; with `mass` (needs `probability`) by mass."""
    by_head = terms(entries)
    shares = probabilities(entries) if probability else None
    keys = logit_keys(entries) if shares is None else probability_keys(shares)
    keys[local_entry:] = KEY_LOCAL
    mask = select(keys, top_k) if not mass or shares is None else select_mass(keys, weights(shares), mass, top_k)
    return Selected(
        mask,
        tuple(references(entries).tolist()),
        tuple(by_head[:, mask].sum(axis=1).tolist()),
        tuple(by_head.sum(axis=1).tolist()),
    )
