"""Page layouts and random heads."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from nearflash.abi.attend.pages import IndexFormat


@dataclass(frozen=True)
class Layout:
    group_tokens: int = 16
    interleaved: bool = False
    block_tokens: int = 256
    index_format: IndexFormat = IndexFormat.INT4
    page_bytes: int = 4096


@pytest.fixture
def make_layout():
    return Layout


@pytest.fixture
def make_heads():
    """q (N, P, g, d), k, v (N, S, d) with fp16 values, some large channels, some tokens that attract q; tokens (P,)."""

    def make(heads=2, positions=3, group=2, tokens=700, dim=64, seed=0):
        rng = np.random.default_rng(seed)
        q, k, v = (
            rng.standard_normal((heads, *shape, dim)) for shape in ((positions, group), (tokens,), (tokens,))
        )  # fmt: skip
        q[..., rng.choice(dim, dim // 8, replace=False)] *= 4
        k[:, rng.choice(tokens, math.ceil(tokens / 32), replace=False)] += q[:, :1, 0] / 4
        seen = torch.arange(tokens - positions + 1, tokens + 1)
        return *(torch.from_numpy(x.astype(np.float16).astype(np.float32)) for x in (q, k, v)), seen

    return make
