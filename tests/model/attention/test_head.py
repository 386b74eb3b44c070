"""The model of one head against the algorithm in double precision, and the algorithm's invariants.

Bounds against double precision, V_max being the largest |V| of the tokens or |v_mean|: for the tokens and the alpha
that the model chose, weights keep their ratios to 2^-10 and the output is rounded once: |out - exact| <= 2^-9.5 ·
V_max. The masses behind alpha are cut: |alpha - exact| <= 2^-10 for tokens, 2^-9 for pages. Keys are fp16, so a token
that is left out may have 2^-9 more of a key than one that is taken.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from nearflash.abi.attention.descriptor import Mode
from nearflash.abi.attention.faults import Fault
from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.errors import FormatError, ShapeError
from nearflash.model.attention.head import attend, attend_repeated
from nearflash.model.attention.memory.index import quantise
from nearflash.model.attention.memory.settings import HeadSettings

LOG2E = 1.4426950408889634
PAGE = Mode.PAGE | Mode.PROBABILITY
FP16, INT8, INT4 = IndexFormat


def settings(dim=64, **kinds):
    defaults = dict(mode=Mode(0), score_dims=dim // 4, top_k=64, local_window=16, block_tokens=256)
    return HeadSettings(dim=dim, scale=LOG2E / dim**0.5, **{**defaults, **kinds})


def dense(dim, group, reference=8):
    reference = reference if isinstance(reference, tuple) else (reference,) * group
    return HeadSettings(Mode.DENSE | Mode.REFERENCE, dim, LOG2E / dim**0.5, reference=reference)


def assert_near(result, reference, head, log2_bound=-9.5):
    exact = reference(*head).attend(result.chosen, result.alpha)
    largest = max(np.abs(head[2][result.chosen]).max(), np.abs(head[3]).max())
    assert np.abs(result.out - exact).max() <= 2.0**log2_bound * largest


def assert_same(a, b):
    assert a.faults == b.faults == 0
    np.testing.assert_array_equal(a.chosen, b.chosen)
    np.testing.assert_array_equal(a.out.view(np.uint16), b.out.view(np.uint16))
    np.testing.assert_array_equal(a.alpha, b.alpha)


def dequantised(k, kind):
    """K as the index has it, the unindexed suffix as it is."""
    k, covered = k.astype(np.float64), kind.count_scanned(len(k))
    if kind.index_format is not FP16:
        for start in range(0, covered, kind.block_tokens):
            own = slice(start, start + kind.block_tokens)
            block = quantise(k[own].astype(np.float16), kind.index_format)
            k[own] = block.zero.astype(np.float64) + block.scale.astype(np.float64) * block.codes
    return k


@pytest.mark.parametrize(("tokens", "dim", "group"), [(1, 64, 1), (77, 128, 8), (1000, 80, 3), (4096, 128, 4)])
def test_dense_equals_torch(make_head, reference, tokens, dim, group):
    head = make_head(tokens, dim, group, seed=tokens)
    result = attend_repeated(*head, dense(dim, group))
    q, k, v = (torch.from_numpy(x.astype(np.float64)) for x in head[:3])
    theirs = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0].numpy()
    assert not result.faults and result.alpha.tolist() == [1.0] * group and result.selected == tokens
    assert np.abs(result.out - theirs).max() <= 2.0**-9.5 * np.abs(head[2]).max()
    assert_near(result, reference, head)


@pytest.mark.parametrize("index", IndexFormat)
@pytest.mark.parametrize(("mode", "n"), [(Mode(0), 16), (Mode.PROBABILITY, 16), (PAGE, 8), (Mode.PAGE, 32)])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_near_double_precision(make_head, reference, index, mode, n, group):
    """Output, alpha and, where a key is a single token's, the choice itself."""
    head = make_head(1117, 64, group, seed=group)
    page = bool(mode & Mode.PAGE)
    kind = settings(mode=mode, index_format=index, group_tokens=n, top_k=128 // n if page else 128)
    result = attend_repeated(*head, kind)
    assert not result.faults and result.selected == kind.top_k and result.chosen[-16:].all()
    assert_near(result, reference, head)

    exact = reference(*head)
    np.testing.assert_array_equal(result.score_dims, exact.score_dims(kind.score_dims))
    scores = exact.approximate(result.score_dims, dequantised(head[1], kind))
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    alpha = p[:, result.chosen].sum(axis=1)
    assert result.alpha.min() > 0 and result.alpha.max() < 1
    assert np.abs(result.alpha - alpha).max() <= (2.0**-9 if page else 2.0**-10)
    if not page:
        keys = (p if mode else scores).sum(axis=0)[: -kind.local_window]
        taken, left = keys[result.chosen[: -kind.local_window]].min(), keys[~result.chosen[: -kind.local_window]].max()
        assert taken >= left - 2.0**-9 * abs(left) - (0 if mode else 2.0**-8)


@pytest.mark.parametrize("index", IndexFormat)
@pytest.mark.parametrize(("score_dims", "mode"), [(64, Mode(0)), (64, PAGE), (4, Mode(0)), (4, Mode.PAGE)])
def test_top_k_of_all_tokens_equals_dense(make_head, score_dims, mode, index):
    head = make_head(700, 64, 2, seed=1)
    everything = attend(*head, settings(score_dims=score_dims, mode=mode, index_format=index, top_k=700))
    assert everything.alpha.tolist() == [1.0, 1.0]
    assert_same(everything, attend(*head, dense(64, 2, everything.references)))


def test_layout_changes_no_number(make_head):
    head = make_head(1500, 64, 2, seed=2)
    base = attend(*head, settings())
    assert 0 < base.alpha.max() < 1
    for layout in (
        dict(group_tokens=4, block_tokens=64),
        dict(group_tokens=32, block_tokens=1024),
        dict(group_tokens=12, block_tokens=48, interleaved=True, page_bytes=16384),
        dict(group_tokens=16, block_tokens=512, page_bytes=8192),
    ):
        assert_same(base, attend(*head, settings(**layout)))
    coded = attend(*head, settings(index_format=INT8))
    assert_same(coded, attend(*head, settings(index_format=INT8, group_tokens=32, page_bytes=16384)))


@pytest.mark.parametrize("index", IndexFormat)
def test_permutation_of_dims_changes_nothing(make_head, index):
    q, k, v, v_mean = make_head(900, 64, 3, seed=3)
    kind = settings(index_format=index)
    magnitude = np.sort(np.abs(q.astype(np.float64)).sum(axis=0))[::-1]
    assert magnitude[kind.score_dims - 1] > magnitude[kind.score_dims] * (1 + 2**-9), "no tie at the last dim"
    order = np.random.default_rng(4).permutation(64)
    assert_same(attend(q, k, v, v_mean, kind), attend(q[:, order], k[:, order], v, v_mean, kind))


def test_mass_takes_what_it_needs_and_no_more(make_head, reference):
    head = make_head(2048, 64, 2, seed=5)
    for tau in (0.3, 0.7, 0.95):
        kind = settings(mode=PAGE, score_dims=32, group_tokens=8, top_k=256, top_p=int(tau * 65536))
        result = attend(*head, kind)
        exact = reference(*head)
        scores = exact.approximate(result.score_dims)
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        pages = (p / p.sum(axis=1, keepdims=True)).mean(axis=0).reshape(-1, 8).sum(axis=1)
        chosen = result.chosen.reshape(-1, 8).any(axis=1)
        assert pages[chosen].sum() >= tau - 2**-8
        needless = np.sort(pages[:-2][chosen[:-2]])[:2].sum()
        assert pages[chosen].sum() - needless < tau + 2**-8
        capped = attend(*head, replace(kind, top_k=result.selected - 3))
        assert capped.selected == result.selected - 3 and not (capped.chosen & ~result.chosen).any()


def test_reference_is_repeated_until_it_fits(make_head):
    head = make_head(300, 64, 2, seed=6)
    fits = attend_repeated(*head, dense(64, 2))
    top = fits.maximum
    for shift, fault in ((9, Fault.REFERENCE_LOW), (8, Fault(0)), (-8, Fault(0)), (-9, Fault.REFERENCE_HIGH)):
        kind = dense(64, 2, tuple(m + shift for m in top))
        once = attend(*head, kind)
        assert once.faults == fault and once.maximum == top
        assert (once.out is None) == bool(fault)
        assert_same(attend_repeated(*head, kind), attend(*head, dense(64, 2, top)) if fault else once)


def test_a_scan_that_misjudges_is_repeated(make_head):
    """The chosen tokens' exact logits lie 16 binades above what the chosen dim says."""
    q, k, v, v_mean = make_head(256, 64, 1, seed=7)
    q[:] = 1.0
    q[0, 0], k[:, 0] = 1.25, 0.0
    k[:, 1:] = np.float16(2.0)
    kind = settings(score_dims=1, top_k=16)
    assert attend(q, k, v, v_mean, kind).faults == Fault.REFERENCE_HIGH
    again = attend_repeated(q, k, v, v_mean, kind)
    assert not again.faults and again.references == again.maximum
    np.testing.assert_allclose(again.alpha, 16 / 256)


def test_only_what_is_used_must_be_finite(make_head):
    q, k, v, v_mean = make_head(600, 64, 2, seed=8)
    kind = settings(block_tokens=128, index_format=INT8)
    good = attend(q, k, v, v_mean, kind)
    token, dim = np.flatnonzero(~good.chosen)[0], good.score_dims[0]
    other = np.setdiff1d(np.arange(64), good.score_dims)[0]

    def with_value(array, where, value):
        changed = array.copy()
        changed[where] = value
        return changed

    for value in (np.inf, -np.inf, np.nan):
        assert_same(good, attend(q, with_value(k, (token, other), value), with_value(v, token, value), v_mean, kind))
        for bad in (
            (with_value(q, (1, other), value), k, v),
            (q, with_value(k, (token, dim), value), v),
            (q, with_value(k, (599, dim), value), v),
            (q, with_value(k, (599, other), value), v),
            (q, k, with_value(v, (599, 63), value)),
        ):
            result = attend(*bad, v_mean, kind)
            assert result.faults & Fault.NONFINITE and result.out is None


def test_a_fault_of_q_or_of_the_scores_ends_the_head(make_head):
    q, k, v, v_mean = make_head(100, 64, 2, seed=10)
    bad = q.copy()
    bad[1, 7] = np.nan
    high = k.copy()
    high[3] = 60000  # would be a fault of the range too, in the scores and in the gather
    for kind in (settings(), dense(64, 2, -90)):
        result = attend(bad, high, v, v_mean, kind)
        assert result.faults == Fault.NONFINITE and result.sums is None and result.maximum == ()
    broken = k.copy()
    broken[:] = np.inf
    result = attend(q, broken, v, v_mean, settings())
    assert result.faults == Fault.NONFINITE and result.sums is None and result.entries == 100
    assert result.completion(1).maximum == () and not result.chosen.any()


def test_a_saturated_logit_does_not_keep_the_gather_from_its_faults(make_head):
    q, k, v, v_mean = make_head(100, 64, 1, seed=11)
    q[:] = 0
    q[0, 0], q[0, 1:9] = 8, 4
    k[:], k[5, 0] = 0, 1000  # 8000 · scale passes 2^11 in base 2; exactly cancelled below
    k[5, 1:9], v[5, 2] = -250, np.nan
    kind = replace(settings(score_dims=1, top_k=20), scale=0.5)
    result = attend(q, k, v, v_mean, kind)
    assert result.faults == Fault.SCORE_RANGE | Fault.NONFINITE
    v[5, 2] = 1
    assert attend(q, k, v, v_mean, kind).faults == Fault.SCORE_RANGE, "REFERENCE_LOW is not judged then"


@pytest.mark.parametrize("index", IndexFormat)
def test_scores_out_of_range_are_a_fault(index):
    kind = settings(index_format=index, block_tokens=64, group_tokens=16)
    q, k, v = (np.ones((n, 64), np.float16) for n in (1, 128, 128))
    assert not attend(q, k, v, np.zeros(64, np.float32), kind).faults
    q[0, 3], k[7, 3] = 4096, 8192
    result = attend(q, k, v, np.zeros(64, np.float32), kind)
    assert result.faults == Fault.SCORE_RANGE and result.out is None and result.sums is None
    assert attend(q, k, v, np.zeros(64, np.float32), dense(64, 1)).faults & Fault.SCORE_RANGE


def test_completion_of_a_head(make_head):
    head = make_head(130, 64, 2, seed=9)
    result = attend(*head, settings(mode=PAGE, top_k=3, group_tokens=16))
    done = result.completion(pages=11)
    assert (done.faults, done.selected, done.entries, done.pages, done.maximum) == (0, 3, 9, 11, result.maximum)


def test_arrays_must_fit(make_head):
    q, k, v, v_mean = make_head(40, 64, 2)
    kind = settings()
    with pytest.raises(FormatError, match="q must be float16, not float32"):
        attend(q.astype(np.float32), k, v, v_mean, kind)
    with pytest.raises(ShapeError, match=r"v must have the shape \(40, 64\), none of it zero, not \(39, 64\)"):
        attend(q, k, v[:39], v_mean, kind)
    with pytest.raises(ShapeError, match="q must have 1 to 8 heads, not 9"):
        attend(np.repeat(q[:1], 9, axis=0), k, v, v_mean, kind)
    with pytest.raises(ShapeError, match="reference must have 2 elements, one a head of q, not 3"):
        attend(q, k, v, v_mean, dense(64, 3))
