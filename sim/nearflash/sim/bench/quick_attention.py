"""The algorithm of the attend kernel in fp32 on many heads at once: for searches. The bit-exact one is nearflash.model.

Arrays: q (heads, g, d), k and v (heads, S, d), probabilities and scores (heads, g, S), chosen tokens (heads, S).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.descriptor import Mode
from nearflash.abi.attention.pages import IndexFormat
from nearflash.model.attention.index import quantise
from nearflash.model.attention.settings import Settings

__all__ = ["QuickHeads", "relative_error"]

F32 = NDArray[np.float32]
Mask = NDArray[np.bool_]


def relative_error(out: F32, exact: F32) -> F32:
    """|out - exact| / |exact|, Euclidean, over the last axis."""
    return np.asarray(np.linalg.norm(out - exact, axis=-1) / np.linalg.norm(exact, axis=-1))


def _softmax(scores: F32) -> F32:
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(p / p.sum(axis=-1, keepdims=True))


@dataclass(frozen=True)
class Approximation:
    """What the scan knows."""

    channels: NDArray[np.int64]
    """(heads, r), ascending."""
    scores: F32
    probabilities: F32


class QuickHeads:
    """Heads of one text: dense attention, and what is left of it when only some tokens are read."""

    def __init__(self, q: NDArray[np.float16], k: NDArray[np.float16], v: NDArray[np.float16]) -> None:
        self._half_k = k
        self.q, self.k, self.v = (x.astype(np.float32) for x in (q, k, v))
        self._scale = np.float32(q.shape[-1] ** -0.5)
        self._scores = self.q @ self.k.transpose(0, 2, 1) * self._scale
        self.probabilities = _softmax(self._scores)
        self.dense = self.probabilities @ self.v
        self._v_mean = self.v.mean(axis=1, keepdims=True)

    def approximate(self, settings: Settings) -> Approximation:
        """Scores over the channels of `settings`, from its index."""
        size = np.abs(self.q)
        channels = np.sort(np.argsort(-size.sum(axis=1), axis=-1, kind="stable")[:, : settings.channels], axis=-1)
        at = channels[:, None, :]
        share = np.take_along_axis(size, at, 2).sum(2, keepdims=True) / size.sum(2, keepdims=True)
        keys = np.stack([self._index(k[:, c], settings) for k, c in zip(self._half_k, channels, strict=True)])
        scores = np.take_along_axis(self.q, at, 2) @ keys.transpose(0, 2, 1) * self._scale / np.sqrt(share)
        return Approximation(channels, scores, _softmax(scores))

    @staticmethod
    def _index(k: NDArray[np.float16], settings: Settings) -> F32:
        """k (S, r) as the index has it."""
        wide = k.astype(np.float32)
        covered = 0 if settings.index_format is IndexFormat.FP16 else settings.scanned(len(k))
        for start in range(0, covered, settings.block_tokens):
            own = slice(start, start + settings.block_tokens)
            block = quantise(k[own], settings.index_format)
            wide[own] = block.zero.astype(np.float32) + block.scale.astype(np.float32) * block.codes
        return wide

    def choose(self, approximation: Approximation, settings: Settings) -> Mask:
        """Tokens that are read."""
        heads, tokens = self.k.shape[:2]
        n = settings.entry_tokens
        source = approximation.probabilities if settings.mode & Mode.PROBABILITY else approximation.scores
        each = np.pad(source.sum(axis=1), ((0, 0), (0, -tokens % n)))
        shares = each.reshape(heads, -1, n).sum(axis=2)
        keys = shares.copy()
        keys[:, max(0, tokens - settings.local) // n :] = np.inf
        order = np.argsort(-keys, axis=1, kind="stable")[:, : settings.budget]
        wanted = np.ones(order.shape, bool)
        if settings.mass:
            taken = np.take_along_axis(shares, order, 1)
            wanted = np.cumsum(taken, axis=1) - taken < settings.mass / 65536 * self.q.shape[1]
        mask = np.zeros(shares.shape, bool)
        np.put_along_axis(mask, order, wanted, 1)
        return np.repeat(mask, n, axis=1)[:, :tokens]

    def attend(self, approximation: Approximation, chosen: Mask) -> F32:
        """Output (heads, g, d) from the chosen tokens, the mean of V for the rest."""
        tokens = chosen[:, None, :]
        out = _softmax(np.where(tokens, self._scores, np.float32(-np.inf))) @ self.v
        alpha = (approximation.probabilities * tokens).sum(axis=-1, keepdims=True)
        return np.asarray(alpha * out + (1 - alpha) * self._v_mean)

    def lost(self, chosen: Mask) -> F32:
        """Probability of dense attention on the tokens that are not read, (heads, g)."""
        return np.asarray((self.probabilities * ~chosen[:, None, :]).sum(axis=-1))
