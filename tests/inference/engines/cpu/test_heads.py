"""Heads of a sequence in a call: large groups, several chunks, several threads; the same numbers in every case."""

import numpy as np
import pytest

from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.errors import CommandError
from nearflash.device import open_device
from nearflash.inference.engines.cpu import engine as cpu_module
from nearflash.inference.engines.cpu import heads as cpu_heads
from nearflash.inference.engines.cpu.engine import CpuEngine
from nearflash.inference.engines.cpu.heads import dims_by_size, takes_all
from nearflash.inference.engines.device.engine import DeviceEngine
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.storage.kv import KvLayout

POLICIES = {
    "dense": AttentionPolicy(),
    "sparf": AttentionPolicy("sparf", score_dims=0.25, top_k=0.1, local_window=8),
    "page": AttentionPolicy("sparf-page", score_dims=0.5, top_k=0.25, local_window=8),
    "mass": AttentionPolicy("sparf-page", score_dims=0.5, top_k=0.5, top_p=0.9, local_window=1, keep_tail=True),
}


def assert_near(out, want):
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(
    ("group_tokens", "interleaved", "page_bytes"),
    [(128, True, 16384), (128, False, 8192), (256, False, 16384), (512, True, 65536), (512, False, 32768)],
)
def test_groups_larger_than_a_devices(
    make_store, make_layout, shape, filled, name, group_tokens, interleaved, page_bytes, draw_q, expected
):  # fmt: skip
    layout = make_layout(group_tokens, interleaved, 1024, IndexFormat.INT4, page_bytes)
    engine = CpuEngine(make_store(shape, layout, blocks=16, buffer_bytes=4 * page_bytes), POLICIES[name])
    numbers, stored = filled(engine, shape, [2500, 700])
    q = draw_q(shape, 2)
    assert_near(engine.attend(1, numbers, q), expected(q, stored, POLICIES[name], layout))


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("chunk_groups", [1, 5])
@pytest.mark.parametrize("cache_groups", [0, 20, 1000])
def test_chunks_give_the_same(
    make_store, make_layout, shape, filled, monkeypatch, name, chunk_groups, cache_groups, draw_q, expected
):
    """Also where an earlier chunk's groups take the places that a later one would have liked."""
    layout = make_layout()
    monkeypatch.setattr(cpu_heads, "_CHUNK_BYTES", chunk_groups * layout.page_bytes)
    engine = CpuEngine(make_store(shape, layout), POLICIES[name], page_cache_bytes=cache_groups * layout.page_bytes)
    numbers, stored = filled(engine, shape, [300, 123])
    for seed in range(4):
        q = draw_q(shape, 2, seed=seed)
        assert_near(engine.attend(1, numbers, q), expected(q, stored, POLICIES[name], layout))


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("sequences", [1, 4])
def test_threads_that_compute_give_the_same(
    make_store, make_layout, shape, filled, monkeypatch, threads, sequences, draw_q, expected
):
    """Of one long sequence each head is a part of its own."""
    monkeypatch.setattr(cpu_module, "_THREADS", threads)
    monkeypatch.setattr(cpu_module, "_APART_TOKENS", 100)
    layout, policy = make_layout(), POLICIES["page"]
    engine = CpuEngine(make_store(shape, layout, blocks=64), policy, page_cache_bytes=60 * layout.page_bytes,
                       index_cache_bytes=1 << 20)  # fmt: skip
    numbers, stored = filled(engine, shape, [220, 150, 310, 90][:sequences])
    for seed in range(5):
        q = draw_q(shape, sequences, seed=seed)
        assert_near(engine.attend(1, numbers, q), expected(q, stored, policy, layout))
    engine.close()


def test_no_sequences_is_no_work(make_store, make_layout, shape):
    with CpuEngine(make_store(shape, make_layout()), POLICIES["page"], page_cache_bytes=1 << 20) as engine:
        assert engine.attend(0, [], np.empty((0, 3, 2, 32), np.float16)).shape == (0, 3, 2, 32)


def test_sequences_in_memory_and_on_flash_in_one_call(make_store, make_layout, shape, filled, draw_q, expected):
    """The short ones are attended to in one compiled call, the others by parts."""
    layout = make_layout(block_tokens=64)
    engine = CpuEngine(make_store(shape, layout), POLICIES["dense"], page_cache_bytes=1 << 20)
    numbers, stored = filled(engine, shape, [10, 200, 63, 64, 1])
    q = draw_q(shape, 5)
    assert_near(engine.attend(1, numbers, q), expected(q, stored, POLICIES["dense"], layout))


def test_counters_of_threads_that_read_add_up(make_store, make_layout, shape, filled, monkeypatch, draw_q):
    monkeypatch.setattr(cpu_heads, "_CHUNK_BYTES", 4096)
    layout = make_layout()
    engine = CpuEngine(make_store(shape, layout, suffix_bytes=0), POLICIES["dense"])
    numbers, _ = filled(engine, shape, [200, 200])
    for _ in range(3):
        engine.attend(1, numbers, draw_q(shape, 2))
    engine._settle()  # the fourth call's reads
    assert engine.counters.flash_bytes == {"token": 4 * 2 * shape.kv_heads * 25 * 4096}
    assert engine.counters.seconds["read"] > 0


def test_policies_that_take_all_tokens_need_no_scores():
    layout = KvLayout(16, True, 1024, IndexFormat.INT4, 4096)
    assert takes_all(AttentionPolicy(), 5000, 64, layout)
    assert takes_all(AttentionPolicy("sparf-page", top_k=1.0), 5000, 64, layout)
    assert takes_all(AttentionPolicy("sparf", top_k=0.1, local_window=64), 64, 64, layout)
    assert takes_all(AttentionPolicy("sparf", top_k=0.1, min_tokens=500), 500, 64, layout)
    assert not takes_all(AttentionPolicy("sparf", top_k=0.1, min_tokens=500), 501, 64, layout)
    assert not takes_all(AttentionPolicy("sparf-page", top_k=1.0, top_p=0.9), 5000, 64, layout)


def test_dims_by_the_size_of_q():
    """Summed over query heads, rounded to fp16; the lower dim first among equals."""
    q = np.zeros((2, 1, 2, 5), np.float16)
    q[0, 0] = [[1, -3, 0, 2, 2], [1, 0, -1, 0, 0]]
    q[1, 0, 0] = [4, 4.001, 4, 8, 0]
    assert dims_by_size(q).tolist() == [[[1, 0, 3, 4, 2]], [[3, 0, 1, 2, 4]]]


@pytest.mark.parametrize("name", ["sparf", "page", "mass"])
def test_an_index_in_memory_gives_the_same(make_store, make_layout, shape, filled, name, draw_q, expected):
    """None of it, what there is room for, all: also after more tokens, and in a store of fewer of them."""
    layout, policy = make_layout(), POLICIES[name]
    outs = []
    for room in (0, 5000, 1 << 20):
        engine = CpuEngine(make_store(shape, layout), policy, index_cache_bytes=room)
        numbers, stored = filled(engine, shape, [200, 75])
        own = []
        for seed in range(3):
            q = draw_q(shape, 2, seed=seed)
            own.append(engine.attend(1, numbers, q))
            assert_near(own[-1], expected(q, stored, policy, layout))
            more = draw_q(shape, 2, group=40, seed=seed + 50)
            for row, number in enumerate(numbers):
                engine.append(number, 1, more[row], -more[row])
                stored[row] = [
                    np.concatenate([x, y], axis=1) for x, y in zip(stored[row], (more[row], -more[row]), strict=True)
                ]
        outs.append(own)
    np.testing.assert_array_equal(outs[0], outs[2])
    np.testing.assert_array_equal(outs[1], outs[2])


@pytest.mark.parametrize("failing", [0, 1, 3])
def test_what_fails_in_a_thread_is_raised(
    make_store, make_layout, shape, filled, monkeypatch, failing, draw_q, expected
):  # fmt: skip
    """Whichever thread has the sequence; the next call gives what it should."""
    monkeypatch.setattr(cpu_module, "_THREADS", 2)
    layout, policy = make_layout(), POLICIES["page"]
    engine = CpuEngine(make_store(shape, layout, blocks=64), policy, page_cache_bytes=60 * layout.page_bytes)
    numbers, stored = filled(engine, shape, [220, 150, 310, 90])
    attend = cpu_heads.Heads.attend

    def broken(part, form):
        if part.row == failing:
            raise RuntimeError(f"row {part.row}")
        return attend(part, form)

    q = draw_q(shape, 4)
    with monkeypatch.context() as patch:
        patch.setattr(cpu_heads.Heads, "attend", broken)
        with pytest.raises(RuntimeError, match=f"row {failing}"):
            engine.attend(1, numbers, q)
    assert_near(engine.attend(1, numbers, q), expected(q, stored, policy, layout))
    engine.close()


def test_a_device_does_not_take_large_groups(make_store, make_layout, shape):
    with open_device("model:attend-tiny", "attend") as device:
        store = make_store(shape, make_layout(128, False, 256, IndexFormat.INT4, 8192))
        message = r"at most 64 tokens, not 128|must be an attend kernel for pages of 8192 bytes"
        with pytest.raises(CommandError, match=message):
            DeviceEngine(device, store, POLICIES["page"])


def test_chunks_are_attended_to_in_order_as_they_come():
    class Running:
        seen = []

        def attend_groups(self, groups, shape, chosen):
            self.seen.append(groups)
            if groups == "c1":  # what comes meanwhile is for the thread that attends
                in_order.attend(2, "c2")
                assert self.seen[-1] == "c1"

    in_order = cpu_heads._RunningInOrder(Running(), None, None)
    after = [in_order.attend(number, f"c{number}") or len(Running.seen) for number in (3, 1, 0)]
    assert after == [0, 0, 4] and Running.seen == ["c0", "c1", "c2", "c3"]
