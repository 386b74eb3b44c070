"""Decode attention in double precision, written from the algorithm and not from the model; and random heads."""

from dataclasses import dataclass

import numpy as np
import pytest

LOG2E = 1.4426950408889634


@dataclass
class Reference:
    """Clean SparF over one KV head in doubles; q (g, d), k and v (S, d), v_mean (d,)."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    v_mean: np.ndarray

    def __post_init__(self):
        self.q, self.k, self.v, self.v_mean = (np.asarray(x, np.float64) for x in (self.q, self.k, self.v, self.v_mean))

    def score_dims(self, r):
        return np.sort(np.argsort(-np.abs(self.q).sum(axis=0), kind="stable")[:r])

    def approximate(self, dims, index=None):
        """Scores over the dims of `index` (K where none), with the scale corrected for the share of |q|: (g, S)."""
        d = self.q.shape[1]
        share = np.abs(self.q[:, dims]).sum(axis=1) / np.abs(self.q).sum(axis=1)
        dots = self.q[:, dims] @ (self.k if index is None else index)[:, dims].T
        return dots / np.sqrt(d * np.where(share > 0, share, 1.0))[:, None]

    def attend(self, chosen, alpha=None):
        """Output (g, d) over the chosen tokens (S,), mixed with v_mean by alpha (g,)."""
        scores = np.where(chosen, self.q @ self.k.T / np.sqrt(self.q.shape[1]), -np.inf)
        out = softmax(scores) @ self.v
        return out if alpha is None else alpha[:, None] * out + (1 - alpha[:, None]) * self.v_mean


def softmax(z):
    p = np.exp(z - z.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


@pytest.fixture
def make_head():
    """Random q, k, v (fp16) and v_mean (fp32), with some outlier dims and some tokens that attract q."""

    def make(tokens, dim=64, group=2, seed=0, strength=1.0):
        rng = np.random.default_rng(seed)
        q, k, v = (rng.standard_normal((n, dim)) for n in (group, tokens, tokens))
        outliers = rng.choice(dim, dim // 8, replace=False)
        q[:, outliers] *= 4
        k[rng.choice(tokens, max(1, tokens // 32), replace=False)] += strength * q[rng.integers(group)] / 4
        q, k, v = (x.astype(np.float16) for x in (q, k, v))
        return q, k, v, v.astype(np.float64).mean(axis=0).astype(np.float32)

    return make


@pytest.fixture
def reference():
    return Reference
