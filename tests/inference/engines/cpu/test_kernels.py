"""The loops against torch and plain numpy, in float64, at sizes around their tiles."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nearflash.inference.engines.cpu import kernels
from nearflash.inference.engines.cpu.kernels import Choice, PageShape, RunningAttention
from nearflash.inference.engines.paged.index_rows import IndexRows
from nearflash.inference.engines.paged.reads import Groups
from nearflash.inference.engines.paged.softmax import AttentionForm
from nearflash.support.native import find_address

NO_PAGES = np.zeros((0, 1), np.float16)


@pytest.fixture
def rng():
    return np.random.default_rng(5)


def halves(rng, *shape):
    return rng.standard_normal(shape).astype(np.float16)


def numbers(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def attention(q, k, v, taken, softcap=0.0, sinks=None):
    """Torch's softmax over logits in float64: q (g, d), scaled, k and v (S, d), taken (S,) bool."""
    logits = torch.from_numpy(q).double() @ torch.from_numpy(k[taken]).double().T
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    if sinks is not None:
        logits = torch.cat([logits, torch.from_numpy(sinks).double()[:, None]], 1)
    p = torch.softmax(logits, 1)
    return (p[:, : taken.sum()] @ torch.from_numpy(v[taken]).double()).numpy()


def groups_of(runs, k, v, each):
    """Runs of one head, K and V in one array behind each other, as page groups; and their shape."""
    ints, dim = np.array(runs, np.int64), k.shape[1]
    data = np.concatenate([k.reshape(-1), v.reshape(-1)])[None]
    return Groups(ints, np.array([len(ints)]), ints, data, NO_PAGES, NO_PAGES), PageShape(each * dim, k.size, dim, each)


def suffix_of(k, v, mean):
    """Tokens in memory: K and V (heads, u, d), and the mean of V (heads, d)."""
    return SimpleNamespace(suffix_k=k, suffix_v=v, v_mean=mean)


def run(q, k, v, runs, each, chosen=None, softcap=0.0, sinks=None, alpha=None, mean=None):
    """The kernels' output over `runs`, each a list of runs that one call takes."""
    group, dim = q.shape
    running = RunningAttention(q[None].copy(), softcap)
    for part in runs:
        running.attend_groups(*groups_of(part, k, v, each), None if chosen is None else chosen.reshape(1, -1).copy())
    alpha = np.ones((1, group), np.float32) if alpha is None else alpha[None].copy()
    mean = np.zeros((1, dim), np.float32) if mean is None else mean[None].copy()
    none = np.zeros((1, 0, dim), np.float16)
    sinks = None if sinks is None else sinks[None].copy()
    return running.finish(suffix_of(none, none, mean), np.zeros(1, np.int64), None, alpha, sinks)[0]


@pytest.mark.parametrize("each", [1, 16, 63, 64, 65, 200])
@pytest.mark.parametrize("group, dim", [(1, 16), (3, 64), (8, 128)])
def test_runs_in_any_order_give_the_attention_of_all(rng, each, group, dim):
    k, v = halves(rng, 5 * each, dim), halves(rng, 5 * each, dim)
    q = rng.standard_normal((group, dim), np.float32) * np.float32(dim**-0.5)
    out = run(q, k, v, [[3, 0], [4], [], [2, 1]], each)
    assert np.abs(out - attention(q, k, v, np.ones(5 * each, bool))).max() < 2e-6


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_chosen_tokens_softcap_and_sinks(rng, softcap):
    k, v = halves(rng, 6 * 80, 64), halves(rng, 6 * 80, 64)
    q = rng.standard_normal((2, 64), np.float32)
    chosen = rng.random((6, 80)) < 0.1
    chosen[1], chosen[2, :64] = False, False  # a run, and a tile, of which nothing is chosen
    sinks = np.array([1.5, -40.0], np.float32)
    out = run(q, k, v, [[5, 1, 2], [0, 3, 4]], 80, chosen, softcap, sinks)
    assert np.abs(out - attention(q, k, v, chosen.reshape(-1), softcap, sinks)).max() < 5e-6


def test_logits_far_apart_neither_overflow_nor_vanish(rng):
    """e^x of the logits themselves would be infinite, or 0 for all."""
    k, v = halves(rng, 128, 16), halves(rng, 128, 16)
    for factor in (300.0, 1e-8):
        q = rng.standard_normal((2, 16), np.float32) * np.float32(factor)
        out = run(q, k, v, [[1], [0]], 64)
        assert np.abs(out - attention(q, k, v, np.ones(128, bool))).max() < 1e-4


def test_the_share_that_was_not_chosen_is_the_mean_of_v(rng):
    k, v, mean = halves(rng, 64, 16), halves(rng, 64, 16), rng.standard_normal(16, np.float32)
    q, alpha = rng.standard_normal((2, 16), np.float32), np.array([0.75, 1.0], np.float32)
    every = attention(q, k, v, np.ones(64, bool))
    want = alpha[:, None] * every + (1 - alpha[:, None]) * mean
    assert np.abs(run(q, k, v, [[0]], 64, alpha=alpha, mean=mean) - want).max() < 2e-6


@pytest.mark.parametrize("tokens", [1, 64, 257])
def test_attention_in_memory_is_that_of_its_layer(rng, tokens):
    suffixes = halves(rng, 2, 3, 2, 300, 32)  # K or V, layer, head, token, dimension
    suffixes[:, :, :, tokens:] = np.nan  # room that holds nothing yet
    q, sinks = halves(rng, 2, 4, 32), rng.standard_normal((2, 4)).astype(np.float32)
    for given in (None, sinks):
        out = np.empty(q.shape, np.float32)
        kernels.attend_memory(q, *suffixes[:, 1], tokens, AttentionForm(0.25, None, given), out)
        for head in range(2):
            k, v = suffixes[:, 1, head, :tokens]
            own = None if given is None else given[head]
            want = attention(q[head].astype(np.float32) * 0.25, k, v, np.ones(tokens, bool), sinks=own)
            assert np.abs(out[head] - want).max() < 2e-6


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 16])
@pytest.mark.parametrize("dim", [4, 20, 36, 80, 100, 256])
def test_every_number_of_query_heads_and_dims(rng, group, dim):
    """Dims that do not fill vectors, too; some tokens do not count."""
    k, v = halves(rng, 3 * 140, dim), halves(rng, 3 * 140, dim)
    q, chosen = rng.standard_normal((group, dim), np.float32) / np.float32(dim**0.5), rng.random((3, 140)) < 0.7
    every = np.ones(3 * 140, bool)
    assert np.abs(run(q, k, v, [[2, 0, 1]], 140) - attention(q, k, v, every)).max() < 5e-6
    out = run(q, k, v, [[2], [0, 1]], 140, chosen)
    assert np.abs(out - attention(q, k, v, chosen.reshape(-1))).max() < 5e-6


@pytest.mark.parametrize("dim", [32, 20])
def test_groups_in_memory_and_new_ones(rng, dim):
    """K and V of a token together, or V behind all K; each head's groups from three arrays."""
    each, shape = 24, (7, 2, 24, dim)
    kept, new = halves(rng, *shape), halves(rng, *shape)
    q = rng.standard_normal((2, 3, dim), np.float32) / np.float32(dim**0.5)
    places, numbers, ends = np.array([3, -2, 0, -7, 6]), np.array([0, 1, 2, 0, 4]), np.array([3, 5])
    groups = [kept[place] if place >= 0 else new[-1 - place] for place in places]
    for together in (True, False):
        flat = [np.ascontiguousarray(x.swapaxes(1, 2) if together else x).reshape(7, -1) for x in (kept, new)]
        stride, v_from = (2 * dim, dim) if together else (dim, each * dim)
        running = RunningAttention(q, None)
        shape = PageShape(2 * each * dim, v_from, stride, each)
        running.attend_groups(Groups(numbers, ends, places, flat[0], flat[1][:4], flat[1][4:].copy()), shape, None)
        for head, own in enumerate((groups[:3], groups[3:])):
            k, v = (np.concatenate([group[part] for group in own]) for part in range(2))
            want = attention(q[head], k, v, np.ones(len(k), bool))
            assert np.abs(running.out[head] / running.total[head][:, None] - want).max() < 5e-6


@pytest.mark.parametrize("tokens", [0, 1, 70])
def test_the_tokens_in_memory_end_an_attention(rng, tokens):
    """Of some heads, in their order, out of views of larger arrays; after groups that were attended to."""
    room = halves(rng, 2, 4, 90, 32)
    k, v = room[:, :, :tokens]
    before = halves(rng, 2, 4, 50, 32)
    q, heads, mean = rng.standard_normal((2, 3, 32), np.float32) / 6, np.array([3, 1]), numbers(rng, 4, 32)
    chosen, alpha = rng.random((2, tokens)) < 0.5, np.array([[1, 0.5, 0.75], [0.25, 1, 1]], np.float32)
    for masks in (None, chosen):
        running = RunningAttention(q, None)
        pages = np.concatenate([before[0].reshape(4, -1), before[1].reshape(4, -1)], axis=1)
        running.attend_groups(Groups(np.zeros(2, np.int64), np.array([1, 2]), heads, pages, NO_PAGES, NO_PAGES),
                              PageShape(pages.shape[1], 50 * 32, 32, 50), None)  # fmt: skip
        out = running.finish(suffix_of(k, v, mean), heads, masks, alpha, None)
        for own, head in enumerate(heads):
            every_k, every_v = (np.concatenate([before[part, head], x[head]]) for part, x in enumerate((k, v)))
            taken = np.concatenate([np.ones(50, bool), np.ones(tokens, bool) if masks is None else masks[own]])
            share = alpha[own][:, None]
            want = share * attention(q[own], every_k, every_v, taken) + (1 - share) * mean[head]
            assert np.abs(out[own] - want).max() < 5e-6


def test_numbers_that_are_not_finite_are_found(rng):
    words = halves(rng, 1000).view(np.uint16)
    edges = np.array([0x0000, 0x8000, 0x0001, 0x7BFF, 0xFBFF], np.uint16)
    assert all(kernels.are_finite(array.view(np.float16)) for array in (words, edges, words[:0]))
    for place, word in ((0, 0x7C00), (999, 0xFC00), (500, 0x7E00), (17, 0xFFFF), (18, 0x7C01)):
        wrong = words.copy()
        wrong[place] = word
        assert not kernels.are_finite(wrong.view(np.float16))


def score_index(loops, q, codes, factors, rows, bits, scores):
    """Scores (g, width) of one head's index blocks, codes (B, R, T·bits/8)."""
    blocks, lines, length = codes.shape
    index = kernels._Index(1, blocks, lines, length, bits, 0, 0, 0, find_address(codes), find_address(factors), None,
                           find_address(rows))  # fmt: skip
    loops.index_scores(ctypes.byref(index), q, *q.shape, scores, scores.shape[1])


def choice_of(group, each, entries, **fields):
    return kernels._Choice(group=group, each=each, entries=entries, **fields)


def weigh(loops, scores, factors, softcap, each, by_probability, keys, shares):
    choice = choice_of(len(scores), each, len(keys), softcap=softcap, by_probability=by_probability)
    loops.weighed(ctypes.byref(choice), scores, scores.shape[1], factors, keys, shares)


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("block_tokens", [256, pytest.param(1024, marks=pytest.mark.full)])
def test_index_rows_are_scored(loops, rng, bits, block_tokens):
    """codes·scale + zero, a row for each dimension; rows that are not asked for hold other numbers."""
    dims, blocks = 5, 3
    values = rng.integers(0, 16 if bits == 4 else 256, (blocks, 9, block_tokens)).astype(np.float64)
    if bits == 16:
        rows_of = halves(rng, blocks, 9, block_tokens)
        codes, values = rows_of.view(np.uint8), rows_of.astype(np.float64)
    elif bits == 8:
        codes = values.astype(np.uint8)
    else:
        codes = (values[..., 0::2] + 16 * values[..., 1::2]).astype(np.uint8)
    factors = halves(rng, blocks, 9, 2)
    rows = np.array([rng.choice(9, dims, replace=False) for _ in range(blocks)])[0]
    q = rng.standard_normal((3, dims), np.float32)
    scores = np.full((3, blocks * block_tokens + 7), 5, np.float32)
    score_index(loops, q, codes, factors, rows, bits, scores)
    scale, zero = (factors[..., i : i + 1].astype(np.float64) for i in (0, 1))
    numbers = values if bits == 16 else values * scale + zero
    want = np.einsum("gr,brt->gbt", q.astype(np.float64), numbers[:, rows]).reshape(3, -1)
    assert np.abs(scores[:, :-7] - want).max() < 1e-5 * max(np.abs(want).max(), 1)
    assert (scores[:, -7:] == 5).all()


def test_keys_of_the_suffix_are_scored_behind_the_index(loops, rng):
    q, k = rng.standard_normal((2, 64), np.float32), halves(rng, 30, 64)
    scores = np.full((2, 50), 5, np.float32)
    loops.suffix_scores(q, *q.shape, k, len(k), 20, scores, scores.shape[1])
    assert (scores[:, :20] == 5).all() and np.abs(scores[:, 20:] - q.astype(np.float64) @ k.T).max() < 1e-5


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("tokens, each", [(100, 1), (100, 8), (100, 16), (96, 16), (300, 128)])
def test_keys_of_entries_are_sums_of_probabilities(loops, rng, softcap, tokens, each):
    scores = rng.standard_normal((3, tokens), np.float32) * 8
    factors = np.array([0.5, -1.0, 2.0], np.float32)
    logits = torch.from_numpy(scores * factors[:, None]).double()
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    want = torch.softmax(logits, 1).numpy()
    entries = -(-tokens // each)
    keys, shares = np.empty(entries, np.float32), np.empty((3, entries), np.float32)
    weigh(loops, scores, factors, softcap, each, True, keys, shares)
    padded = np.pad(want, ((0, 0), (0, entries * each - tokens))).reshape(3, entries, each)
    assert np.abs(shares - padded.sum(2)).max() < 1e-6
    assert np.allclose(keys, 4096 * padded.sum((0, 2)), rtol=1e-5)


def test_keys_of_entries_by_their_largest_logits(loops, rng):
    scores = rng.standard_normal((2, 70), np.float32)
    largest = np.pad(scores, ((0, 0), (0, 10)), constant_values=-1e9).reshape(2, 5, 16).max(2).sum(0)
    keys, shares = np.empty(5, np.float32), np.empty((2, 5), np.float32)
    weigh(loops, scores, np.full(2, 0.5, np.float32), 0.0, 16, False, keys, shares)
    assert np.allclose(keys, 0.5 * largest * np.log2(np.e), rtol=1e-5)


def expected_choice(keys, each, tokens, window, top_k, top_p):
    """By sorting: local entries, then the largest keys, the lower index first among equals."""
    rounded = keys.astype(np.float16).astype(np.float64)
    local = [e for e in range(len(keys)) if (e + 1) * each > max(tokens - window, 0)]
    others = sorted(set(range(len(keys))) - set(local), key=lambda e: (-rounded[e], e))
    taken, reached = set(local), rounded[local].sum()
    needed = top_p / 65536 * rounded.sum()
    for place, entry in enumerate(others):
        behind = place and rounded[others[place - 1]] != rounded[entry]
        if len(taken) >= top_k or (top_p and reached >= needed and (behind or not place)):
            break
        taken.add(entry)
        reached += rounded[entry]
    return np.isin(np.arange(len(keys)), list(taken))


@pytest.mark.parametrize("each, window", [(1, 0), (1, 5), (16, 20), (16, 500)])
@pytest.mark.parametrize("top_p", [0, 30_000, 65_000])
def test_entries_are_chosen_as_by_sorting(loops, rng, each, window, top_p):
    tokens = 400
    entries = -(-tokens // each)
    probabilities = rng.dirichlet(np.full(tokens, 0.05), 2).astype(np.float32)
    shares = np.add.reduceat(probabilities, range(0, tokens, each), axis=1)
    counts, alpha = np.zeros(1 << 16, np.int32), np.empty(2, np.float32)
    for signed in (False, True):
        for levels in (3, 1000):  # many equals; few
            for top_k in (0, 1, 7, entries - 1, entries):
                keys = (rng.integers(0, levels, entries) / 8).astype(np.float32)
                keys = keys - np.float32(levels / 16) if signed and not top_p else keys
                taken = np.empty(entries, bool)
                choice = choice_of(2, each, entries, window=window, top_k=top_k, top_p=top_p,
                                   counts=find_address(counts))  # fmt: skip
                loops.chosen(ctypes.byref(choice), tokens, keys, shares, taken, alpha)
                assert np.array_equal(taken, expected_choice(keys, each, tokens, window, top_k, top_p))
                share = probabilities[:, np.repeat(taken, each)[:tokens]].sum(1, dtype=np.float64)
                assert np.abs(alpha - share).max() < 1e-5 and not counts.any()


@pytest.mark.parametrize("bits, block_tokens", [(4, 16), (4, 48), (8, 32), (16, 16), (4, 1040)])
@pytest.mark.parametrize("group", [1, 4, 7])
def test_blocks_of_every_length_are_scored(loops, rng, group, bits, block_tokens):
    """Those that vectors do not divide, too, by every number of query heads."""
    codes = rng.integers(0, 256, (3, 6, block_tokens * bits // 8)).astype(np.uint8)
    if bits == 16:
        codes = halves(rng, 3, 6, block_tokens).view(np.uint8)
    wide = {4: np.stack([codes & 15, codes >> 4], axis=-1).reshape(3, 6, -1), 8: codes, 16: codes.view(np.float16)}[
        bits
    ]
    q, rows, factors = numbers(rng, group, 4), np.array([0, 2, 3, 5]), halves(rng, 3, 6, 2)
    scores = np.empty((group, 3 * block_tokens), np.float32)
    score_index(loops, q, codes, factors, rows, bits, scores)
    scale, zero = (factors[..., i : i + 1].astype(np.float64) for i in (0, 1))
    found = wide.astype(np.float64) if bits == 16 else wide * scale + zero
    want = np.einsum("gr,brt->gbt", q.astype(np.float64), found[:, rows]).reshape(group, -1)
    assert np.abs(scores - want).max() < 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("by_probability", [True, False])
@pytest.mark.parametrize("each", [1, 16])
def test_heads_choose_by_their_own_scores(rng, each, by_probability):
    """Scores of the index and the suffix, scaled by the share of |q| in their dims, weighed and chosen."""
    heads, group, dim, covered, suffix_tokens, top_k = 3, 2, 16, 96, 20, 40 // each
    k = halves(rng, heads, covered + suffix_tokens, dim)
    q, dims = (
        numbers(rng, heads, group, dim),
        np.sort(np.array([rng.choice(dim, 5, replace=False) for _ in range(heads)])),
    )
    tokens = covered + suffix_tokens
    codes = k[:, :covered].reshape(heads, 3, 32, dim).swapaxes(2, 3).copy().view(np.uint8)
    suffix, none = k[:, covered:], np.zeros((heads, 3, dim, 2), np.float16)
    taken, alpha = Choice(each, by_probability, 8, top_k, 0).choose(
        q, dims, IndexRows(codes, none), dims, 16, suffix, AttentionForm(0.25, None, None),
        (np.empty(group * tokens, np.float32), np.zeros(1 << 16, np.int32)),
    )  # fmt: skip
    for head in range(heads):
        near = q[head][:, dims[head]].astype(np.float64)
        share = np.abs(q[head]).sum(1, dtype=np.float64) / np.abs(near).sum(1)
        logits = 0.25 * np.sqrt(share)[:, None] * (near @ k[head][:, dims[head]].T.astype(np.float64))
        p = torch.softmax(torch.from_numpy(logits), 1).numpy()
        pad = -tokens % each
        entries = np.pad(p, ((0, 0), (0, pad))).reshape(group, -1, each)
        largest = np.pad(logits, ((0, 0), (0, pad)), constant_values=-1e9).reshape(group, -1, each).max(2).sum(0)
        keys = 4096 * entries.sum((0, 2)) if by_probability else largest * np.log2(np.e)
        want = expected_choice(keys.astype(np.float32), each, tokens, 8, top_k, 0)
        assert (taken[head] == want).mean() > 0.97  # two whose keys are alike may be taken for one another
        assert taken[head].sum() == want.sum()
        np.testing.assert_allclose(alpha[head], entries.sum(2)[:, taken[head]].sum(1), rtol=1e-4)
