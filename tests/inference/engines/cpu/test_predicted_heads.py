"""KVSwap's rule in CpuEngine against a computation in NumPy alone."""

import numpy as np
import pytest

from nearflash.abi.errors import PageError, UnsupportedError
from nearflash.inference.engines.cpu.engine import CpuEngine
from nearflash.inference.policy.policy import AttentionPolicy

TOKENS, BLOCK, GROUP, RANK = 139, 32, 8, 4  # values of the index for each head
POLICY = AttentionPolicy("kvswap", score_dims=RANK, top_k=5, local_window=8)
CHOSEN = 5
"""Groups of the four whole blocks: `top_k` beside the tokens behind them, which are in memory."""


def choose_in_numpy(k, predicted):
    """Groups of whole blocks, by K (H, S, d) of a head's predicted queries (H, g, d)."""
    heads, _, dim = k.shape
    covered = k.shape[1] // BLOCK * BLOCK
    rows = k.transpose(1, 0, 2).reshape(-1, heads * dim)[:covered].astype(np.float64)
    projection = np.linalg.svd(rows[:BLOCK].T)[0][:, : heads * RANK].astype(np.float32)
    index = (rows.astype(np.float32) @ projection).astype(np.float16).astype(np.float32)
    scores = index @ (predicted.mean(axis=1).reshape(-1) @ projection)
    best = scores.reshape(-1, GROUP).max(axis=1)
    best[(k.shape[1] - POLICY.local_window) // GROUP :] = np.inf
    return np.sort(np.argsort(-best, kind="stable")[:CHOSEN])


def attend_in_numpy(q, k, v, tokens):
    logits = np.einsum("hgd,hsd->hgs", q.astype(np.float32), k[:, tokens].astype(np.float32)) / np.sqrt(q.shape[-1])
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.einsum("hgs,hsd->hgd", weights / weights.sum(axis=-1, keepdims=True), v[:, tokens].astype(np.float32))


@pytest.fixture
def open_filled(make_store, make_layout, shape, filled):
    """An engine by a policy, with sequences of these lengths: also their numbers, and K and V."""

    def open_one(policy, lengths=(TOKENS,), **options):
        store = make_store(shape, make_layout(block_tokens=BLOCK), suffix_bytes=1 << 24)
        engine = CpuEngine(store, policy, **options)
        return engine, *filled(engine, shape, lengths)

    return open_one


def step(engine, numbers, stored, q, predicted, sizes=None):
    """A token more, behind queries that predict it, as a model makes it; K and V grow by it."""
    engine.predict(1, numbers, predicted)
    engine._settle()
    sizes is not None and sizes.append(engine.counters.flash_bytes["token"])
    for row, (number, kv) in enumerate(zip(numbers, stored, strict=True)):
        new = [x[:, row : row + 1] for x in kv]
        engine.append(number, 1, *new)
        stored[row] = [np.concatenate([x, one], axis=1) for x, one in zip(kv, new, strict=True)]
    return engine.attend(1, numbers, q)


@pytest.mark.parametrize("page_cache_bytes", [0, 1 << 20])
def test_groups_are_those_of_the_rule_read_ahead_and_counted(open_filled, shape, draw_q, page_cache_bytes):
    engine, numbers, stored = open_filled(POLICY, (TOKENS, 100), page_cache_bytes=page_cache_bytes)
    q, predicted, ahead = draw_q(shape, 2), draw_q(shape, 2, seed=9).astype(np.float32), []
    made = (4 + 3) * BLOCK // GROUP  # K is read once to make the index
    for _ in range(2):
        out, pages = step(engine, numbers, stored, q, predicted, ahead), 0
        for row, (k, v) in enumerate(stored):
            groups = choose_in_numpy(k, predicted[row])
            covered = k.shape[1] // BLOCK * BLOCK
            tokens = [*(groups[:, None] * GROUP + np.arange(GROUP)).reshape(-1), *range(covered, k.shape[1])]
            np.testing.assert_allclose(out[row], attend_in_numpy(q[row], k, v, tokens), rtol=1e-4, atol=1e-4)
            pages += len(groups)
        assert ahead[-1] == engine.counters.flash_bytes["token"]  # attention itself read nothing
    assert ahead == [3 * 4096 * (made + pages), 3 * 4096 * (made + (1 if page_cache_bytes else 2) * pages)]
    rows = sum(2 * 3 * RANK * covered for covered in (128, 96)) + 2 * 4 * 3 * RANK * 3 * 32
    assert engine.cache_bytes - engine._pages.size_bytes == rows


def test_the_first_layer_is_read_ahead_from_the_third_token_on(open_filled, shape, draw_q):
    """It takes all, as none is before it; the others' predictions are as they are."""
    engine, numbers, stored = open_filled(POLICY)
    q, outs = draw_q(shape, 1), []
    engine.append(numbers[0], 0, *stored[0])
    for _ in range(3):
        outs.append(engine.attend(0, numbers, q))
        before = engine.counters.flash_bytes["token"]
        step(engine, numbers, stored, q, q.astype(np.float32))
        engine._settle()
    assert set(engine._ahead) == {(0, numbers[0])} and engine.counters.flash_bytes["token"] > before
    before = engine.counters.flash_bytes["token"]
    outs.append(engine.attend(0, numbers, q))
    assert engine.counters.flash_bytes["token"] == before
    assert all(np.array_equal(out, outs[0]) for out in outs)


def test_a_block_that_the_new_token_completes_is_read_late(open_filled, shape, draw_q):
    engine, numbers, stored = open_filled(POLICY, (159,))
    q, predicted = draw_q(shape, 1), draw_q(shape, 1, seed=9).astype(np.float32)
    engine.predict(1, numbers, predicted)
    assert not engine._ahead
    out = step(engine, numbers, stored, q, predicted)
    ((k, v),) = stored
    groups = choose_in_numpy(k, predicted[0])
    tokens = (groups[:, None] * GROUP + np.arange(GROUP)).reshape(-1)
    np.testing.assert_allclose(out[0], attend_in_numpy(q[0], k, v, tokens), rtol=1e-4, atol=1e-4)


def test_damaged_pages_that_were_read_ahead_are_an_error_of_the_call(open_filled, shape, draw_q, monkeypatch):
    engine, numbers, stored = open_filled(POLICY)
    q, predicted = draw_q(shape, 1), draw_q(shape, 1, seed=9).astype(np.float32)
    step(engine, numbers, stored, q, predicted)
    read = type(engine.store).read

    def fail(self, pages, keys):
        raise PageError("page must be readable", [])

    monkeypatch.setattr(type(engine.store), "read", fail)
    with pytest.raises(PageError, match="page must be readable"):
        step(engine, numbers, stored, q, predicted)
    monkeypatch.setattr(type(engine.store), "read", read)
    step(engine, numbers, stored, q, predicted)


def test_a_budget_of_everything_is_dense_to_the_bit(open_filled, shape, draw_q):
    q, outs = draw_q(shape, 1), []
    for policy in (AttentionPolicy("kvswap", score_dims=RANK, top_k=1.0), AttentionPolicy()):
        engine, numbers, _ = open_filled(policy)
        if engine.takes_predictions:
            engine.predict(1, numbers, q.astype(np.float32))
        outs.append(engine.attend(1, numbers, q))
    np.testing.assert_array_equal(*outs)


def test_without_a_prediction_the_first_layer_alone_attends(open_filled, shape, draw_q):
    engine, numbers, stored = open_filled(POLICY)
    with pytest.raises(UnsupportedError, match="engine must be given queries that the layer before predicts"):
        engine.attend(1, numbers, draw_q(shape, 1))
    engine.append(numbers[0], 0, *stored[0])
    q = draw_q(shape, 1)
    out = engine.attend(0, numbers, q)[0]
    np.testing.assert_allclose(out, attend_in_numpy(q[0], *stored[0], range(TOKENS)), rtol=1e-4, atol=1e-4)
    with pytest.raises(UnsupportedError, match="takes predictions, not cpu"):
        open_filled(AttentionPolicy())[0].predict(0, [1], q.astype(np.float32))


def test_forks_and_crops_have_the_index_of_their_tokens(open_filled, shape, draw_q):
    """A fork goes on alike, also where the other is cropped and grows by other tokens."""
    engine, (number,), ((k, v),) = open_filled(POLICY)
    engine.append(number, 0, k, v)
    q, predicted = draw_q(shape, 1), draw_q(shape, 1, seed=9).astype(np.float32)

    def attend(sequence):
        engine.predict(1, [sequence], predicted)
        return engine.attend(1, [sequence], q)

    out, other = attend(number), engine.fork(number)
    engine.crop(number, 40)
    for layer in (0, 1):
        engine.append(number, layer, -k[:, 40:], v[:, 40:])
    np.testing.assert_array_equal(attend(other), out)
    changed = attend(number)
    fresh, (second,), _ = open_filled(POLICY, (40,))
    fresh.append(second, 1, -k[:, 40:], v[:, 40:])
    fresh.predict(1, [second], predicted)
    assert (changed != out).any()
    engine.free(number)
    np.testing.assert_array_equal(attend(other), out)
