import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.errors import PageError
from nearflash.inference.engines.base import EngineCounters
from nearflash.inference.engines.cpu import engine as host_engine
from nearflash.inference.engines.cpu.engine import CpuEngine
from nearflash.inference.policy.policy import AttentionPolicy

LENGTHS = [1, 70, 64, 139, 8]
POLICIES = {
    "dense": AttentionPolicy(),
    "sparq": AttentionPolicy("sparq", score_dims=0.5, top_k=0.25, local_window=4),
    "sparf": AttentionPolicy("sparf", score_dims=0.25, top_k=16, local_window=8),
    "logits": AttentionPolicy("sparf", score_dims=8, top_k=16, local_window=2, by_probability=False),
    "page": AttentionPolicy("sparf-page", score_dims=0.5, top_k=0.25, local_window=8),
    "mass": AttentionPolicy("sparf-page", score_dims=0.5, top_k=0.5, top_p=0.8, local_window=1),
    "tail": AttentionPolicy("sparf-page", score_dims=0.5, top_k=3, local_window=1, keep_tail=True),
}


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("name", POLICIES)
def test_every_mode_gives_what_arrays_give(
    make_store, make_layout, shape, filled, name, interleaved, draw_q, expected
):  # fmt: skip
    policy, layout = POLICIES[name], make_layout(interleaved=interleaved)
    engine = CpuEngine(make_store(shape, layout), policy)
    numbers, stored = filled(engine, shape, LENGTHS)
    q = draw_q(shape, len(LENGTHS), 2)
    out = engine.attend(1, numbers, q)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, expected(q, stored, policy, layout), rtol=1e-4, atol=1e-4)
    assert engine.counters.heads == 15


@pytest.mark.parametrize("form", IndexFormat)
def test_every_index_format(make_store, make_layout, shape, filled, form, draw_q, expected):
    policy, layout = POLICIES["page"], make_layout(form=form, block_tokens=48, group_tokens=4)
    engine = CpuEngine(make_store(shape, layout), policy)
    numbers, stored = filled(engine, shape, [139, 97, 20])
    q = draw_q(shape, 3, 1)
    want = expected(q, stored, policy, layout, 0.3)
    np.testing.assert_allclose(engine.attend(1, numbers, q, 0.3), want, rtol=1e-4, atol=1e-4)


def test_only_pages_asked_for_are_read(make_store, make_layout, shape, filled, draw_q):
    """Dense: every group on flash. By page: index pages with a chosen channel, K of the suffix, chosen groups."""
    layout = make_layout(block_tokens=64)
    asked = {}
    for name, policy in (("dense", POLICIES["dense"]), ("page", AttentionPolicy("sparf-page", 8, 3, local_window=8))):
        engine = CpuEngine(make_store(shape, layout, suffix_bytes=0), policy)
        numbers, _ = filled(engine, shape, [140])
        engine.attend(1, numbers, draw_q(shape, 1, 1))
        asked[name] = {kind: size // 4096 for kind, size in engine.counters.flash_bytes.items()}
    assert asked["dense"] == {"token": 3 * 17}
    pages = layout.index_layout(shape.dim).pages
    assert 3 * 2 <= asked["page"]["index"] <= 3 * 2 * pages
    suffix, last = 1, 1  # groups after token 128: one full, one in memory, which is chosen and read from there
    assert 3 * suffix <= asked["page"]["token"] <= 3 * (suffix + 3 - last)


@pytest.mark.parametrize("name", POLICIES)
def test_tails_in_memory_are_not_read(make_store, make_layout, shape, filled, name, draw_q):
    """Whole blocks alone are; where there is none, nothing is. Outputs are the same."""
    q, reads, outs = draw_q(shape, 1, 2), {}, {}
    for kept in (True, False):
        layout = make_layout(block_tokens=64)
        store = make_store(shape, layout, suffix_bytes=3 * 64 * shape.token_bytes * kept)
        engine = CpuEngine(store, POLICIES[name])
        numbers, _ = filled(engine, shape, [61, 140, 140])
        for length, number in zip((61, 140), numbers, strict=False):
            outs[kept, length] = engine.attend(1, [number], q)
            reads[kept, length] = engine.counters.take().flash_bytes.get("token", 0) // 4096
    assert reads[True, 61] == 0 < reads[False, 61] and reads[True, 140] < reads[False, 140]
    if name == "dense":
        assert reads[True, 140] == 3 * 16
    for length in (61, 140):
        np.testing.assert_allclose(outs[True, length], outs[False, length], rtol=1e-4, atol=1e-4)


def test_heads_follow_their_own_policy(make_store, make_layout, shape, filled, draw_q, expected):
    """By the model's head numbers: the store's first head is the model's head 4."""
    layout = make_layout()
    policy = AttentionPolicy(overrides={(1, 5): POLICIES["page"], 0: POLICIES["sparf"]})
    engine = CpuEngine(make_store(shape, layout), policy, first_head=4)
    numbers, stored = filled(engine, shape, [139, 70])
    q = draw_q(shape, 2, 1)
    want = expected(q, stored, POLICIES["dense"], layout)
    want[:, 1] = expected(q, stored, POLICIES["page"], layout)[:, 1]
    np.testing.assert_allclose(engine.attend(1, numbers, q), want, rtol=1e-4, atol=1e-4)


def test_a_damaged_page_is_named(make_store, make_layout, shape, filled, draw_q):
    store = make_store(shape, make_layout())
    engine = CpuEngine(store, POLICIES["dense"])
    numbers, _ = filled(engine, shape, [139])
    store.flush()
    page = int(store.head(numbers[0], 1, 2).token_pages[3])
    path, place = store.flash.path, store.flash.offset(page)
    with path.open("r+b") as file:
        file.seek(place + 100)
        byte = file.read(1)[0]
        file.seek(place + 100)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(PageError, match=r"sequence 0, layer 1, head 2, token page 3 .*tokens \[24, 32\)"):
        engine.attend(1, numbers, draw_q(shape, 1, 1))


def test_freed_sequences_are_gone(make_store, make_layout, shape, filled):
    engine = CpuEngine(make_store(shape, make_layout()), POLICIES["dense"])
    numbers, _ = filled(engine, shape, [20, 30])
    engine.free(numbers[0])
    assert list(engine.store.lengths) == [numbers[1]]
    engine.close()
    engine.close()


@pytest.mark.parametrize("name", POLICIES)
def test_heads_read_one_by_one_give_the_same(
    make_store, make_layout, shape, filled, monkeypatch, name, draw_q, expected
):
    monkeypatch.setattr(host_engine, "_APART_TOKENS", 64)
    engine = CpuEngine(make_store(shape, make_layout()), POLICIES[name])
    numbers, stored = filled(engine, shape, LENGTHS)
    q = draw_q(shape, len(LENGTHS), 2)
    want = expected(q, stored, POLICIES[name], make_layout())
    np.testing.assert_allclose(engine.attend(1, numbers, q), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("blocks", [0, 1, 3, 100])
def test_index_rows_kept_in_memory_give_the_same(make_store, make_layout, shape, filled, blocks, draw_q, expected):
    """Room for none, some or all rows of a sequence that grows."""
    layout = make_layout(block_tokens=32)
    room = blocks * shape.kv_heads * shape.dim * (16 + 4)
    engine = CpuEngine(make_store(shape, layout), POLICIES["page"], index_cache_bytes=room)
    (number,), ((k, v),) = filled(engine, shape, [139])
    for grown in range(3):
        q = draw_q(shape, 1, 2, seed=grown)
        want = expected(q, [(k, v)], POLICIES["page"], layout)
        for _ in range(2):
            engine.counters.take()
            np.testing.assert_allclose(engine.attend(1, [number], q), want, rtol=1e-4, atol=1e-4)
        held = engine.cache_bytes // (shape.kv_heads * shape.dim * 20)
        assert held == (k.shape[1] // 32 if blocks == 100 else held) and held <= blocks
        assert ("index" in engine.counters.flash_bytes) == (held < k.shape[1] // 32)
        more = np.random.default_rng(grown).standard_normal((2, shape.kv_heads, 30, shape.dim)).astype(np.float16)
        engine.append(number, 1, *more)
        k, v = (np.concatenate([old, new], axis=1) for old, new in zip((k, v), more, strict=True))
    engine.free(number)
    assert engine.cache_bytes == 0


@pytest.mark.parametrize("groups", [0, 5, 20, 1000])
@pytest.mark.parametrize("name", ["dense", "page", "mass"])
def test_groups_kept_in_memory_give_the_same(
    make_store, make_layout, shape, filled, name, groups, draw_q, expected, monkeypatch
):
    """Room for none, some or all groups of two sequences that grow; those in memory are not read again."""
    layout = make_layout()
    room = groups * layout.group_pages * layout.page_bytes
    engine = CpuEngine(make_store(shape, layout), POLICIES[name], index_cache_bytes=1 << 20, page_cache_bytes=room)
    monkeypatch.setattr(engine, "_read_next", lambda *_, **__: None)  # what a call itself reads is counted
    numbers, stored = filled(engine, shape, [139, 70])
    read = []
    for grown in range(4):
        q = draw_q(shape, 2, 2, seed=grown // 2)
        want = expected(q, stored, POLICIES[name], layout)
        engine.counters.take()
        np.testing.assert_allclose(engine.attend(1, numbers, q), want, rtol=1e-4, atol=1e-4)
        read.append(engine.counters.flash_bytes.get("token", 0))
        assert engine.cache_bytes <= room + (1 << 20)
        if grown == 1:
            more = np.random.default_rng(3).standard_normal((2, shape.kv_heads, 30, shape.dim)).astype(np.float16)
            engine.append(numbers[1], 1, *more)
            stored[1] = tuple(np.concatenate([old, new], axis=1) for old, new in zip(stored[1], more, strict=True))
    assert read[0] > 0
    assert groups == 0 or read[1] == read[0] - min(groups, read[0] // 4096) * 4096
    for number in numbers:
        engine.free(number)
    assert engine.cache_bytes == 0


def test_counters_lose_nothing_to_several_threads():
    """Readers of KV page groups count at once; an addition that another thread interrupts would lose one of both."""
    counters, each = EngineCounters(), 2000

    def count(_):
        for _ in range(each):
            counters.count("token", 1)
            with counters.time_phase("read"):
                pass

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(count, range(8)))
    finally:
        sys.setswitchinterval(interval)
    assert counters.flash_bytes == {"token": 8 * each} and counters.seconds["read"] > 0
