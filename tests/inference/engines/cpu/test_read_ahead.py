"""Reads by predicted queries, or by the choice before, of policies that choose by q itself: what is read early is not
read again, and changes no bit.
"""

import numpy as np
import pytest

from nearflash.abi.errors import PageError
from nearflash.inference.engines.cpu.engine import CpuEngine
from nearflash.inference.engines.paged import engine as paged
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
    engine._settle()
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


@pytest.fixture
def open_repeated(open_filled, shape, draw_q, monkeypatch):
    """An engine by a policy that has attended twice by the same q, so that it reads ahead of a third call: also its
    sequences, and what that will give where nothing is read ahead.
    """

    def open_one(policy, q, **options):
        with monkeypatch.context() as plain:
            plain.setattr(CpuEngine, "_read_next", lambda *_, **__: None)
            engine, numbers = open_filled(policy, draw_q(shape, len(LENGTHS), seed=4), **options)
            want = engine.attend(1, numbers, q)
        engine, numbers = open_filled(policy, draw_q(shape, len(LENGTHS), seed=4), **options)
        engine.attend(1, numbers, draw_q(shape, len(LENGTHS), seed=4))
        engine._settle()
        return engine, numbers, want

    return open_one


def count_read(engine):
    return engine.counters.flash_bytes.get("token", 0)


@pytest.mark.parametrize("name", ["dense", *POLICIES])
@pytest.mark.parametrize("seed", [4, 5])
def test_what_was_chosen_last_is_read_before_the_next_call(open_repeated, shape, draw_q, name, seed):
    q = draw_q(shape, len(LENGTHS), seed=seed)
    engine, numbers, want = open_repeated(POLICIES.get(name, AttentionPolicy()), q)
    assert set(engine._ahead) == {(1, numbers[0]), (1, numbers[1])}  # the third one's tokens are in memory
    before = count_read(engine)
    new = np.zeros((shape.kv_heads, 1, shape.dim), np.float16)
    engine.append(numbers[2], 0, new, new)  # fills no group: reads go on
    assert engine._ahead
    engine._read_next = lambda *_, **__: None
    np.testing.assert_array_equal(engine.attend(1, numbers, q), want)
    assert (count_read(engine) == before) == (seed == 4 or name == "dense") and not engine._ahead


def test_what_changes_from_call_to_call_is_not_read_ahead(open_filled, shape, draw_q):
    engine, numbers = open_filled(PAGE, draw_q(shape, len(LENGTHS), seed=4))
    for seed in (50, 60, 70):
        engine.attend(1, numbers, draw_q(shape, len(LENGTHS), seed=seed))
        engine._settle()
        kept = [engine._choices._kept[1, number] for number in numbers[:2]]
        assert all(0 < one.again.sum() < 0.9 * one.groups.sum() for one in kept)
        assert not engine._ahead


def test_no_more_is_read_ahead_than_memory_allows(open_repeated, shape, draw_q, monkeypatch):
    monkeypatch.setattr(paged, "_AHEAD_BYTES", 3 * 6 * 4096)  # six groups of each sequence
    q = draw_q(shape, len(LENGTHS), seed=4)
    engine, numbers, want = open_repeated(AttentionPolicy(), q)
    assert len(engine._ahead[1, numbers[0]].data.result()) == 2 * 6
    np.testing.assert_array_equal(engine.attend(1, numbers, q), want)


def test_a_failed_read_ahead_is_an_error_only_of_what_is_wanted(open_repeated, shape, draw_q, monkeypatch):
    q, read = draw_q(shape, len(LENGTHS), seed=4), CpuEngine._read
    engine, numbers, want = open_repeated(PAGE, q)

    def fail(*_):
        raise PageError("page must be readable", [])

    monkeypatch.setattr(CpuEngine, "_read", fail)
    engine._read_next(1, numbers)
    engine._settle()
    monkeypatch.setattr(CpuEngine, "_read", read)
    np.testing.assert_array_equal(engine.attend(1, numbers, q), want)
    monkeypatch.setattr(CpuEngine, "_read", fail)
    engine._read_next(1, numbers)
    with pytest.raises(PageError, match="page must be readable"):
        engine.attend(1, numbers, q)
    monkeypatch.setattr(CpuEngine, "_read", read)
    np.testing.assert_array_equal(engine.attend(1, numbers, q), want)


def test_reads_ahead_end_before_the_store_changes_or_closes(open_repeated, shape, draw_q):
    q = draw_q(shape, len(LENGTHS), seed=4)
    engine, numbers, _ = open_repeated(PAGE, q)
    engine._read_next(1, numbers)
    reads = [ahead.data for ahead in engine._ahead.values()]
    engine.free(numbers[0])
    assert all(read.done() for read in reads) and set(engine._ahead) == {(1, numbers[1])}
    engine.attend(1, numbers[1:], q[1:])
    engine.attend(1, numbers[1:], q[1:])
    (left,) = engine._ahead.values()
    engine.close()
    assert left.data.done()
