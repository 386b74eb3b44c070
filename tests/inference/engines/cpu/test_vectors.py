"""Vector loops against plain numpy in float64: every number of query heads, every place; what is beside stays."""

import numpy as np
import pytest

from nearflash.inference.engines.cpu import vectors
from nearflash.inference.engines.cpu.compiled import compiled
from nearflash.inference.engines.cpu.vectors import HEADS, LANES, PARTS, ROW_TOKENS

EVERY_HEADS = range(1, HEADS + 1)
SPARE = 5
"""Elements before what is written, which stay."""
NOWHERE = 1 << 40
"""Cache lines that are asked for need not be there."""


@compiled
def scored(many, heads, bits, codes, at, length, rows, weights, base, scores, width):
    """Scores from place SPARE on."""
    dims = len(rows)
    if many:
        vectors.score_rows(heads, bits, codes, at, length, rows, dims, NOWHERE, weights, 1, dims, base, 2, scores,
                           SPARE, width)  # fmt: skip
    else:
        vectors.score_few(heads, bits, codes, at, length, rows, dims, NOWHERE, weights, 1, dims, base, 2, scores,
                          SPARE, width)  # fmt: skip


@compiled
def multiplied(heads, q, keys, at, stride, parts, logits, width):
    """Products from place SPARE on."""
    vectors.dots(heads, q, 3, parts * LANES, keys, at, stride, parts, NOWHERE, 4, logits, SPARE, width)


@compiled
def added(heads, parts, weights, width, values, at, stride, count, out, between):
    """To `out` from place SPARE on."""
    vectors.add_values(heads, parts, weights, 2, width, values, at, stride, count, out, SPARE, between)


@pytest.fixture
def rng():
    return np.random.default_rng(23)


def numbers(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("many", [True, False])
@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("heads", EVERY_HEADS)
def test_rows_are_scored(rng, heads, bits, many):
    tokens = ROW_TOKENS if many else 16 if bits == 4 else 8
    length, at = (tokens + 16) * bits // 8, 8
    codes = rng.integers(0, 256, (9, length)).astype(np.uint8)
    if bits == 16:
        codes = rng.standard_normal((9, length // 2)).astype(np.float16).view(np.uint8)
    rows, width = np.array([7, 0, 3, 4]), tokens + 3
    weights, base = numbers(rng, 1 + heads * len(rows)), numbers(rng, 2 + heads)
    scores = np.full(SPARE + heads * width, 99, np.float32)
    scored(many, heads, bits, codes.reshape(-1), at, length, rows, weights, base, scores, width)

    own = codes[rows, at : at + tokens * bits // 8]
    values = {4: np.stack([own & 15, own >> 4], axis=-1).reshape(len(rows), -1), 8: own}
    found = (own.copy().view(np.float16) if bits == 16 else values[bits]).astype(np.float64)
    want = weights[1:].reshape(heads, -1).astype(np.float64) @ found + base[2:, None]
    got = scores[SPARE:].reshape(heads, width)
    np.testing.assert_allclose(got[:, :tokens], want, rtol=1e-5, atol=1e-5 * np.abs(want).max())
    assert (got[:, tokens:] == 99).all() and (scores[:SPARE] == 99).all()


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("heads", EVERY_HEADS)
def test_products_with_keys(rng, heads, parts):
    dim, at = parts * LANES, 7
    stride, width = dim + 3, LANES + 2
    q, keys = numbers(rng, 3 + heads * dim), numbers(rng, at + LANES * stride).astype(np.float16)
    logits = np.full(SPARE + heads * width, 99, np.float32)
    multiplied(heads, q, keys.view(np.uint16), at, stride, parts, logits, width)
    tokens = keys[at:].reshape(LANES, stride)[:, :dim].astype(np.float64)
    got = logits[SPARE:].reshape(heads, width)
    np.testing.assert_allclose(got[:, :LANES], q[3:].reshape(heads, dim) @ tokens.T, rtol=1e-4, atol=1e-4)
    assert (got[:, LANES:] == 99).all() and (logits[:SPARE] == 99).all()


@pytest.mark.parametrize("count", [0, 1, 6])
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("heads", EVERY_HEADS)
def test_values_are_added_by_weights(rng, heads, parts, count):
    dim, at = parts * LANES, 9
    stride, width, between = dim + 3, count + 2, dim + 1
    values = numbers(rng, at + count * stride).astype(np.float16)
    weights, out = numbers(rng, 2 + heads * width), numbers(rng, SPARE + heads * between)
    before = out.copy()
    added(heads, parts, weights, width, values.view(np.uint16), at, stride, count, out, between)
    tokens = values[at:].reshape(count, stride)[:, :dim].astype(np.float64)
    change = (out - before)[SPARE:].reshape(heads, between)
    want = weights[2:].reshape(heads, width)[:, :count] @ tokens
    np.testing.assert_allclose(change[:, :dim], want, rtol=1e-4, atol=1e-4)
    assert (change[:, dim:] == 0).all() and (out[:SPARE] == before[:SPARE]).all()
