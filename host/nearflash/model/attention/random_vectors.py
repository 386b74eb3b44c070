"""Random test vectors: heads of given settings, or of a mode with everything that it leaves open at random."""

import math

import numpy as np

from nearflash.abi.attention.codeword import PageTag
from nearflash.abi.attention.descriptor import Mode
from nearflash.abi.attention.fixed_point import LOG2E
from nearflash.abi.attention.pages import IndexFormat, TokenLayout
from nearflash.model.attention.memory.settings import HeadSettings
from nearflash.model.attention.vectors import TestVector

__all__ = ["MODES", "random_mode_vector", "random_vector"]

#: Modes by name; sparq ranks as sparf does, and reads no pages of its own.
MODES = {
    "dense": Mode.DENSE | Mode.REFERENCE,
    "sparq": Mode(0),
    "sparf": Mode.PROBABILITY,
    "sparf-page": Mode.PAGE | Mode.PROBABILITY,
}


def random_mode_vector(
    rng: np.random.Generator, mode: str, dim: int, group: int, tokens: int, page_tag: PageTag
) -> TestVector:
    """A head of `mode` with everything that the mode leaves open at random: layouts, formats, top_k, windows."""
    interleaved = bool(rng.integers(2))
    most = TokenLayout.capacity(4096, dim, interleaved)
    group_tokens = int(rng.choice([n for n in (4, 8, 12, 16, 24, 32) if n <= most]))
    blocks = [t for t in (48, 96, 192, 256, 960, 1024) if t % group_tokens == 0]
    page = mode == "sparf-page"
    entries = -(-tokens // group_tokens) if page else tokens
    settings = HeadSettings(
        MODES[mode] & ~Mode.PROBABILITY if mode == "sparf" and group == 1 else MODES[mode],
        dim,
        LOG2E / math.sqrt(dim),
        score_dims=0 if mode == "dense" else int(rng.integers(1, dim + 1)),
        top_k=0 if mode == "dense" else int(rng.integers(1, entries + 1)),
        local_window=0 if mode == "dense" else int(rng.integers(0, min(tokens, 64) + 1)),
        top_p=int(rng.integers(1, 1 << 16)) if page and rng.integers(2) else 0,
        group_tokens=group_tokens,
        interleaved=interleaved,
        block_tokens=int(rng.choice(blocks)),
        index_format=IndexFormat(int(rng.integers(3))),
        reference=(4,) * group if mode == "dense" else (),
    )
    spread = rng.uniform(0.5, 2.0, dim)  # dims differ, as a model's do
    q, k, v = (rng.standard_normal((n, dim)) for n in (group, tokens, tokens))
    return TestVector.of(settings, page_tag, q * spread, k * spread, v)


def random_vector(settings: HeadSettings, tokens: int, group: int, seed: int, *, head: int = 0) -> TestVector:
    """Normal q, k, v with some large dims and some tokens that attract q."""
    rng, dim = np.random.default_rng(seed), settings.dim
    q, k, v = (rng.standard_normal((n, dim)) for n in (group, tokens, tokens))
    q[:, rng.choice(dim, max(1, dim // 8), replace=False)] *= 4
    k[rng.choice(tokens, max(1, tokens // 32), replace=False)] += q[0] / 4
    return TestVector.of(settings, PageTag(seed, head % 7, head), q, k, v)
