"""Approximate scores against exact fractions, and the factors to logits."""

from fractions import Fraction

import numpy as np
import pytest

from nearflash.abi.attention.descriptor import Mode
from nearflash.abi.attention.faults import Fault
from nearflash.abi.attention.pages import IndexFormat
from nearflash.model.attention.control.scan import approximate_scores, logit_scales, top_dims
from nearflash.model.attention.memory.index import quantise
from nearflash.model.attention.memory.settings import HeadSettings
from nearflash.model.attention.memory.source import ArraySource

CODE_LSB = {IndexFormat.INT8: Fraction(1, 1 << 14), IndexFormat.INT4: Fraction(1, 1 << 10)}
SCORE_LSB = Fraction(1, 1 << 16)


def settings(index, block=32, dim=16, score_dims=4):
    return HeadSettings(Mode(0), dim, 0.25, score_dims=score_dims, top_k=1, group_tokens=16, block_tokens=block,
                    index_format=index)  # fmt: skip


def scored(q, k, dims, kind):
    source = ArraySource(k, k, kind)
    return approximate_scores(q[:, dims], source.blocks(dims), source.suffix(dims))


def exact_score(q, k, index, dims, t, covered, block):
    """One score in units of 2^-16, product by product."""
    total = Fraction(0)
    for c in dims:
        query = Fraction(float(q[c]))
        if index is IndexFormat.FP16 or t >= covered:
            total += int(query * Fraction(float(k[t, c])) / SCORE_LSB) * SCORE_LSB
            continue
        own = quantise(k[t // block * block :][:block], index)
        factor = round(query * Fraction(float(own.scale[c])) / CODE_LSB[index]) * CODE_LSB[index]
        offset = round(query * Fraction(float(own.zero[c])) / SCORE_LSB) * SCORE_LSB
        total += factor * int(own.codes[t % block, c]) + offset
    assert (total / SCORE_LSB).denominator == 1
    return int(total / SCORE_LSB)


@pytest.mark.parametrize("index", IndexFormat)
def test_scores_are_exact_sums_of_rounded_products(index):
    rng = np.random.default_rng(2)
    q, k = (rng.standard_normal((n, 16)).astype(np.float16) for n in (2, 75))
    dims = np.array([1, 5, 6, 15])
    scores, faults = scored(q, k, dims, settings(index))
    assert not faults
    expected = [[exact_score(head, k, index, dims, t, 64, 32) for t in range(75)] for head in q]
    np.testing.assert_array_equal(scores, expected)


@pytest.mark.parametrize(
    ("index", "q", "k", "fault"),
    [
        (IndexFormat.FP16, 1024, 127.9, 0),  # limit 2^16 at r = 4, products below twice that
        (IndexFormat.FP16, 1024, 128, 1),
        (IndexFormat.INT4, 1024, 63.94, 0),  # of the offset: the limit itself
        (IndexFormat.INT4, 1024, 64, 1),
        (IndexFormat.INT8, -1024, 64, 1),
    ],
)
def test_range_rule(index, q, k, fault):
    queries, keys = np.zeros((1, 16), np.float16), np.full((32, 16), k, np.float16)
    queries[0, 2] = q
    _, faults = scored(queries, keys, np.array([0, 1, 2, 3]), settings(index))
    assert faults == (Fault.SCORE_RANGE if fault else 0)


@pytest.mark.parametrize(("index", "fits"), [(IndexFormat.INT4, 127.9), (IndexFormat.INT8, 7.99)])
def test_factor_of_18_bits(index, fits):
    keys = np.zeros((32, 16), np.float16)
    keys[1] = (1 << index.bits) - 1  # so the scale is 1
    for factor, fault in ((fits, 0), (fits + 0.2, 1), (-fits, 0), (-fits - 0.2, 1)):
        _, faults = scored(np.full((1, 16), factor, np.float16), keys, np.array([3]), settings(index))
        assert faults == (Fault.SCORE_RANGE if fault else 0)


def test_channels_by_sum_over_heads_lower_index_first():
    q = np.array([[1, -2, 3, 0, 2, 0], [0, 1, 0, -3, 1, 0.5]], np.float16)
    assert [top_dims(q, r).tolist() for r in (1, 2, 3, 4, 6)] == [
        [1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [0, 1, 2, 3, 4, 5],
    ]  # fmt: skip


def test_scale_is_corrected_for_the_share_of_q():
    q = np.array([[3, 0, 4, 9], [0, 5, 0, -1]], np.float16)
    scales = logit_scales(q, np.array([0, 2]), 0.25)
    assert scales.dtype == np.float32 and scales.tolist() == [np.float32(0.25) * np.sqrt(np.float32(16 / 7)), 0.25]
