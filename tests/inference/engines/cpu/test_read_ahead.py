"""Reads by predicted queries, of policies that choose by q itself: what is read early is not read again."""

import numpy as np
import pytest

from nearflash.inference.engines.cpu.engine import CpuEngine
from nearflash.inference.policy.policy import AttentionPolicy

LENGTHS = [139, 100, 20]
PAGE = AttentionPolicy("sparf-page", score_dims=0.5, top_k=0.25, local_window=8, keep_tail=True)
POLICIES = {
    "page": PAGE,
    "mass": AttentionPolicy("sparf-page", score_dims=0.5, top_k=0.5, top_p=0.8, local_window=1, keep_tail=True),
    "sparf": AttentionPolicy("sparf", score_dims=0.25, top_k=16, local_window=8),
    "mixed": AttentionPolicy("sparf-page", top_k=0.25, local_window=8, overrides={(1, 1): AttentionPolicy()}),
}


@pytest.fixture
def open_filled(make_store, make_layout, shape, filled):
    """An engine whose index is in memory, and its sequences; the first call was made."""

    def open_one(policy, q, page_cache_bytes=0, **options):
        store = make_store(shape, make_layout(), suffix_bytes=1 << 24)
        engine = CpuEngine(store, policy, index_cache_bytes=1 << 20, page_cache_bytes=page_cache_bytes, **options)
        numbers, _ = filled(engine, shape, LENGTHS)
        engine.attend(1, numbers, q)
        engine.counters.flash_bytes.clear()
        return engine, numbers

    return open_one


def predict(engine, numbers, q):
    """Bytes of KV page groups that were read then."""
    engine.predict(1, numbers, q.astype(np.float32))
    for ahead in engine._ahead.values():
        ahead.settle()
    return engine.counters.flash_bytes.get("token", 0)


@pytest.mark.parametrize("page_cache_bytes", [0, 1 << 15])
@pytest.mark.parametrize("name", POLICIES)
def test_outputs_are_the_same_and_right_predictions_read_all(open_filled, shape, draw_q, name, page_cache_bytes):
    first, q, other = (draw_q(shape, len(LENGTHS), seed=seed) for seed in (3, 4, 5))
    plain, numbers = open_filled(POLICIES[name], first, page_cache_bytes)
    want, read = plain.attend(1, numbers, q), plain.counters.flash_bytes["token"]
    for predicted in (q, other):
        engine, numbers = open_filled(POLICIES[name], first, page_cache_bytes, read_ahead=True)
        early = predict(engine, numbers, predicted)
        # What is cached is summed first, and which groups a full cache keeps is a matter of time.
        np.testing.assert_allclose(engine.attend(1, numbers, q), want, rtol=0, atol=1e-5 if page_cache_bytes else 0)
        assert not engine._ahead
        every = engine.counters.flash_bytes["token"]
        if page_cache_bytes:
            assert early > 0
        elif predicted is q:
            assert (every > early) == (name == "mixed")  # a head that takes all is not predicted
            assert every == read
        else:
            assert 0 < early < every < read + early


def test_what_was_read_for_tokens_that_are_cropped_is_forgotten(open_filled, shape, draw_q):
    q = draw_q(shape, len(LENGTHS), seed=4)
    engine, numbers = open_filled(PAGE, q, read_ahead=True)
    assert predict(engine, numbers, q) > 0
    rng = np.random.default_rng(1)
    k, v = (rng.standard_normal((shape.kv_heads, 99, shape.dim)).astype(np.float16) for _ in range(2))
    engine.append(numbers[0], 0, *(np.zeros((shape.kv_heads, 139, shape.dim), np.float16) for _ in range(2)))
    engine.crop(numbers[0], 40)
    assert (1, numbers[0]) not in engine._ahead and (1, numbers[1]) in engine._ahead
    engine.append(numbers[0], 1, k, v)
    out = engine.attend(1, numbers[:1], q[:1])
    engine._reads_ahead = False
    np.testing.assert_array_equal(engine.attend(1, numbers[:1], q[:1]), out)
