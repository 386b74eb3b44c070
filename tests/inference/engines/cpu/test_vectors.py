"""Inner loops against plain numpy in float64: every number of query heads, every length; what is beside stays."""

import numpy as np
import pytest

EVERY_HEADS = range(1, 4)
SPARE = 5
"""Elements before what is written, which stay."""
LENGTHS = (0, 1, 3, 7, 8, 15, 16, 17, 31, 64, 100)


@pytest.fixture
def rng():
    return np.random.default_rng(23)


def numbers(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def exponential(loops, values):
    padded = np.pad(values.astype(np.float32), (0, -len(values) % 16))
    out = np.empty(len(padded), np.float32)
    loops.exponential(padded, out, len(padded))
    return out[: len(values)]


def test_exponentials_are_right_to_their_bound(loops):
    values = np.concatenate([np.linspace(-86.99, 0, 200_001), -(2.0 ** np.arange(-30.0, 6.0)), [0.0]]).astype(
        np.float32
    )
    out, exact = exponential(loops, values), np.exp(values.astype(np.float64))
    assert (np.abs(out - exact) <= (2 - values) * 2.0**-23 * exact).all()
    assert out[-1] == 1.0 and (out <= 1).all()


def test_exponentials_of_what_is_far_below_are_nothing(loops):
    assert (exponential(loops, np.array([-87.5, -88.0, -1e4, -3e38])) == 0).all()


@pytest.mark.parametrize("count", LENGTHS)
def test_products_at_places_of_arrays(loops, rng, count):
    """Of `count` elements from places 5 and 3 on."""
    x, y = numbers(rng, count + 20), numbers(rng, count + 20).astype(np.float16)
    x[5 + count :], y[3 + count :] = np.nan, np.nan
    exact = np.dot(x[5 : 5 + count].astype(np.float64), y[3 : 3 + count].astype(np.float64))
    assert loops.product(x[5:], y[3:], count) == pytest.approx(exact, abs=1e-4)


@pytest.mark.parametrize("count", LENGTHS)
def test_sums_of_exponentials_leave_their_terms(loops, rng, count):
    x = numbers(rng, count + 5)
    before, most = x.copy(), float(3 * x.max())
    want = np.exp(3.0 * x[2 : 2 + count].astype(np.float64) - most).sum()
    assert loops.only_sum(x[2:], count, 3.0, most) == pytest.approx(want, rel=1e-5)
    np.testing.assert_array_equal(x, before)


@pytest.mark.parametrize("vectors", [1, 3])
def test_sums_of_entries_are_those_of_each(loops, rng, vectors):
    each = vectors * loops.lanes
    x, out = numbers(rng, loops.lanes, each), np.empty(loops.lanes, np.float32)
    loops.sums_of_entries(x, each, 0.5, 2.0, out)
    np.testing.assert_allclose(out, np.exp(0.5 * x.astype(np.float64) - 2).sum(1), rtol=1e-5)


@pytest.mark.parametrize("count", LENGTHS)
def test_exponentials_in_place_of_their_terms(loops, rng, count):
    """What is beside them stays."""
    x = numbers(rng, count + 5)
    own, most, taken = slice(2, 2 + count), float(0.5 * x.max()), x.copy()
    total = loops.exponentials(taken[2:], count, 0.5, most)
    np.testing.assert_allclose(taken[own], np.exp(0.5 * x[own].astype(np.float64) - most), rtol=1e-5)
    assert total == pytest.approx(taken[own].sum(dtype=np.float64), rel=1e-5)
    np.testing.assert_array_equal(np.delete(taken, own), np.delete(x, own))


@pytest.mark.parametrize("place", [0, 1, 7])
@pytest.mark.parametrize("count", LENGTHS)
def test_the_exponentials_of_vectors_are_those_of_single_numbers(loops, rng, count, place):
    """A vector's or the last ones, within the same bound; far below they are nothing."""
    x = -np.abs(numbers(rng, count + place)) * 30
    x[place::5] = -1e4
    want = exponential(loops, x)
    loops.exponentials(x[place:], count, 1.0, 0.0)
    np.testing.assert_allclose(x[place:], want[place:], rtol=3e-6)
    assert (x[place::5] == 0).all()


@pytest.mark.parametrize("count", LENGTHS)
def test_largest_and_scales(loops, rng, count):
    x = numbers(rng, count + 4)
    own = slice(3, 3 + count)
    assert loops.largest(x[3:], count, -9.0) == max([-9, *x[own]])
    assert loops.largest(x[3:], count, 9.0) == 9
    for place in range(count):
        lifted = x.copy()
        lifted[3 + place] = 7
        assert loops.largest(lifted[3:], count, -9.0) == 7
    scaled = x.copy()
    loops.scaled(-2.0, scaled[3:], count)
    np.testing.assert_array_equal(scaled[own], -2 * x[own])
    np.testing.assert_array_equal(np.delete(scaled, own), np.delete(x, own))


@pytest.mark.parametrize("many", [True, False])
@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("heads", EVERY_HEADS)
def test_rows_are_scored(loops, rng, heads, bits, many):
    tokens = loops.lanes**2 // 2 if many else loops.lanes * (2 if bits == 4 else 1)
    length, at = (tokens + 16) * bits // 8, 8
    codes = rng.integers(0, 256, (9, length)).astype(np.uint8)
    if bits == 16:
        codes = rng.standard_normal((9, length // 2)).astype(np.float16).view(np.uint8)
    rows, width = np.array([7, 0, 3, 4]), tokens + 3
    weights, base = numbers(rng, 1 + heads * len(rows)), numbers(rng, 2 + heads)
    scores = np.full(SPARE + heads * width, 99, np.float32)
    loops.rows(many, bits, heads, codes.reshape(-1)[at:], length, rows, len(rows), weights[1:], base[2:],
               scores[SPARE:], width)  # fmt: skip

    own = codes[rows, at : at + tokens * bits // 8]
    values = {4: np.stack([own & 15, own >> 4], axis=-1).reshape(len(rows), -1), 8: own}
    found = (own.copy().view(np.float16) if bits == 16 else values[bits]).astype(np.float64)
    want = weights[1:].reshape(heads, -1).astype(np.float64) @ found + base[2:, None]
    got = scores[SPARE:].reshape(heads, width)
    np.testing.assert_allclose(got[:, :tokens], want, rtol=1e-5, atol=1e-5 * np.abs(want).max())
    assert (got[:, tokens:] == 99).all() and (scores[:SPARE] == 99).all()


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("heads", EVERY_HEADS)
def test_products_with_keys(loops, rng, heads, parts, few):
    dim, at, count = parts * loops.lanes, 7, 4 if few else loops.lanes
    stride, width = dim + 3, count + 2
    q, keys = numbers(rng, 3 + heads * dim), numbers(rng, at + count * stride).astype(np.float16)
    logits = np.full(SPARE + heads * width, 99, np.float32)
    loops.products(few, heads, q[3:], dim, keys[at:], stride, logits[SPARE:], width)
    tokens = keys[at:].reshape(count, stride)[:, :dim].astype(np.float64)
    got = logits[SPARE:].reshape(heads, width)
    np.testing.assert_allclose(got[:, :count], q[3:].reshape(heads, dim) @ tokens.T, rtol=1e-4, atol=1e-4)
    assert (got[:, count:] == 99).all() and (logits[:SPARE] == 99).all()


@pytest.mark.parametrize("count", [0, 1, 6])
@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("heads", EVERY_HEADS)
def test_values_are_added_by_weights(loops, rng, heads, parts, count):
    dim, at = parts * loops.lanes, 9
    stride, width, between = dim + 3, count + 2, dim + 1
    values = numbers(rng, at + count * stride).astype(np.float16)
    weights, out = numbers(rng, 2 + heads * width), numbers(rng, SPARE + heads * between)
    before = out.copy()
    loops.added(heads, parts, weights[2:], width, values[at:], stride, count, out[SPARE:], between)
    tokens = values[at:].reshape(count, stride)[:, :dim].astype(np.float64)
    change = (out - before)[SPARE:].reshape(heads, between)
    want = weights[2:].reshape(heads, width)[:, :count] @ tokens
    np.testing.assert_allclose(change[:, :dim], want, rtol=1e-4, atol=1e-4)
    assert (change[:, dim:] == 0).all() and (out[:SPARE] == before[:SPARE]).all()


@pytest.mark.parametrize(
    "left, heads", [(1, [1]), (2, [2]), (3, [3]), (4, [2, 2]), (5, [3, 2]), (7, [3, 2, 2]), (16, [3] * 4 + [2, 2])]
)
def test_query_heads_are_taken_together(loops, left, heads):
    """One alone would share nothing."""
    taken = []
    while left:
        taken.append(loops.taken_at_once(left))
        left -= taken[-1]
    assert taken == heads
