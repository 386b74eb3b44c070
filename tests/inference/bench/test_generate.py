"""The bench of generation, with a model and contexts of a few pages."""

import numpy as np
import pytest

from nearflash.abi.errors import CommandError, StateError
from nearflash.inference.bench import generate
from nearflash.inference.bench.full_kv import FullKvEngine
from nearflash.inference.host_engine import HostEngine
from nearflash.inference.policy import AttentionPolicy
from nearflash.storage.kv import KvShape, KvStore

SMALL = KvShape(layers=3, kv_heads=3, dim=64)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(generate, "SHAPE", SMALL)
    monkeypatch.setattr(generate, "CONTEXTS", {"2k": 2048, "none": 64})
    monkeypatch.setattr(generate, "BATCH", 2)
    monkeypatch.setattr(generate, "STEPS", 3)


def test_rows(small):
    rows = {row.get("case"): row for row in generate.run(["2k"])}
    assert list(rows) == ["full-kv", "memory", *generate.POLICIES, None]
    for name, row in rows.items():
        if name is not None:
            assert 0 < row["tokens_per_second_least"] <= row["tokens_per_second"] <= row["tokens_per_second_most"]
            assert row["kv_bytes"] == 2 * 2048 * SMALL.token_bytes
    full = rows["full-kv"]["flash_bytes_per_token"]
    assert full == 2048 * SMALL.token_bytes and rows["memory"]["flash_bytes_per_token"] == 0
    page = rows["sparf-page"]
    # Four groups of 33, of which the last is not on flash; the index was read before.
    assert page["flash_bytes_by_kind"] == {"token": full * 3 / 32, "index": 0}
    assert page["kv_memory_bytes"] == pytest.approx(2 * full / 8, rel=0.1)
    assert page["kv_tail_bytes"] == 2 * 1024 * SMALL.token_bytes and rows["full-kv"]["kv_tail_bytes"] == 0
    speedup = page["tokens_per_second"] / rows["full-kv"]["tokens_per_second"]
    assert rows[None]["speedup_sparf_page_over_full_kv"] == speedup


def test_what_does_not_fit_memory_is_left_out(small, monkeypatch):
    monkeypatch.setattr(generate, "MEMORY_BYTES", 2 * 2048 * SMALL.token_bytes - 1)
    assert "memory" not in {row.get("case") for row in generate.run(["2k"])}


def test_parts_that_do_not_exist(small):
    with pytest.raises(CommandError, match="parts must be some of 2k, none, not 9k"):
        next(generate.run(["9k"]))


def test_full_kv_attends_as_the_host_engine_does(tmp_path, small, monkeypatch):
    monkeypatch.setitem(generate.POLICIES, "dense", AttentionPolicy())
    q = np.random.default_rng(3).standard_normal((2, 3, 2, 64)).astype(np.float16)
    outs = []
    for name in ("full-kv", "dense"):
        (tmp_path / name).mkdir()
        case = generate._Case(name, 192, 2)
        with generate._engine(tmp_path / name, case) as engine:
            assert isinstance(engine, FullKvEngine if name == "full-kv" else HostEngine)
            numbers = [engine.add() for _ in range(2)]
            for layer in range(SMALL.layers):
                for number, kv in zip(numbers, generate._contexts(case, layer), strict=True):
                    engine.append(number, layer, *kv)
            for step in range(2):
                for layer in range(SMALL.layers):
                    new = np.random.default_rng([step, layer]).standard_normal((2, 2, 3, 1, 64)).astype(np.float16)
                    for number, kv in zip(numbers, new, strict=True):
                        engine.append(number, layer, *kv)
                    outs.append(engine.attend(layer, numbers, q, 0.2))
    for full, dense in zip(outs[:6], outs[6:], strict=True):
        np.testing.assert_allclose(full, dense, rtol=1e-4, atol=1e-4)


def test_full_kv_wants_whole_contexts_first(tmp_path):
    with FullKvEngine(tmp_path / "kv", SMALL, sequences=1, tokens=64) as engine:
        k = np.zeros((3, 63, 64), np.float16)
        with pytest.raises(StateError, match=r"must have the shape \(3, 64, 64\), not \(3, 63, 64\)"):
            engine.append(engine.add(), 0, k, k)


def test_stores_of_the_bench_hold_their_contexts(small, tmp_path):
    with generate._engine(tmp_path, generate._Case("sparf-page", 2048, 2)) as engine:
        assert isinstance(engine.store, KvStore)
        assert engine.store.flash.geometry.pages >= 2 * 9 * 36
