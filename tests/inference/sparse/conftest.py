"""Page layouts and random heads."""

import math

import numpy as np
import pytest
import torch

from nearflash.abi.attention.pages import IndexFormat
from nearflash.storage.kv import KvLayout


def _layout(group_tokens=16, interleaved=False, block_tokens=256, index_format=IndexFormat.INT4, page_bytes=4096):
    return KvLayout(group_tokens, interleaved, block_tokens, index_format, page_bytes)


@pytest.fixture
def make_layout():
    return _layout


@pytest.fixture
def make_heads():
    """q (N, P, g, d), k, v (N, S, d) with fp16 values, some large dims, some tokens that attract q; tokens (P,)."""

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
