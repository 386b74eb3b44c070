"""The model of one head against the algorithm in double precision, and the algorithm's invariants.

Bound against double precision, for the tokens and alpha that the model chose (V_max the largest |V| of those tokens, or
of v_mean): the weights are within 2^-10.5 of their ratio, alpha within 2^-8 for pages of 64 tokens, the output is
rounded once: |out - exact| <= 2^-8 · V_max. Selection itself rounds keys to 11 bits, so a token that the model leaves
out has at most 2^-9 more of a key than one that it takes.
"""

import numpy as np
import pytest
import torch

from nearflash.abi.attend.descriptor import Mode
from nearflash.abi.attend.pages import IndexFormat
from nearflash.model.attend.head import attend_repeated
from nearflash.model.attend.settings import Settings

LOG2E = 1.4426950408889634
PAGE = Mode.PAGE | Mode.PROBABILITY
FP16, INT8, INT4 = IndexFormat


def settings(dim=64, **kinds):
    defaults = dict(mode=Mode(0), channels=dim // 4, budget=64, local=16, block_tokens=256)
    return Settings(dim=dim, scale=LOG2E / dim**0.5, **{**defaults, **kinds})


def dense(dim, group, reference=8):
    return Settings(Mode.DENSE | Mode.REFERENCE, dim, LOG2E / dim**0.5, reference=(reference,) * group)


def assert_near(result, reference, head, log2_bound=-8):
    exact = reference(*head).attend(result.chosen, result.alpha)
    largest = max(np.abs(head[2][result.chosen]).max(), np.abs(head[3]).max())
    assert np.abs(result.out - exact).max() <= 2.0**log2_bound * largest


@pytest.mark.parametrize(("tokens", "dim", "group"), [(1, 64, 1), (77, 128, 8), (1000, 80, 3), (4096, 128, 4)])
def test_dense_equals_torch(make_head, reference, tokens, dim, group):
    head = make_head(tokens, dim, group, seed=tokens)
    result = attend_repeated(*head, dense(dim, group))
    q, k, v = (torch.from_numpy(x.astype(np.float64)) for x in head[:3])
    theirs = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0].numpy()
    assert not result.faults and result.alpha.tolist() == [1.0] * group and result.selected == tokens
    assert np.abs(result.out - theirs).max() <= 2.0**-9.5 * np.abs(head[2]).max()
    assert_near(result, reference, head, -9.5)


@pytest.mark.parametrize("index", IndexFormat)
@pytest.mark.parametrize(("mode", "n"), [(Mode(0), 16), (Mode.PROBABILITY, 16), (PAGE, 8), (Mode.PAGE, 32)])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_near_double_precision(make_head, reference, index, mode, n, group):
    head = make_head(1117, 64, group, seed=group)
    page = bool(mode & Mode.PAGE)
    kind = settings(mode=mode, index_format=index, group_tokens=n, budget=128 // n if page else 128)
    result = attend_repeated(*head, kind)
    assert not result.faults and result.selected == kind.budget and 0 < result.alpha.min() <= result.alpha.max() < 1
    assert result.chosen[-16:].all()
    assert_near(result, reference, head)
