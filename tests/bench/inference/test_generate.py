"""The bench of generation, with a model and contexts of a few pages."""

from copy import deepcopy
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.errors import CommandError, StateError
from nearflash.bench.inference import generate
from nearflash.bench.inference.contexts import random_contexts, random_model, text_contexts
from nearflash.bench.inference.full_kv import FullKvEngine
from nearflash.inference.engines.cpu import CpuEngine
from nearflash.inference.models import kv_shape, load_model
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.storage.kv import KvLayout, KvShape, KvStore

SMALL = KvShape(layers=3, kv_heads=3, dim=64)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(generate, "SHAPE", SMALL)
    monkeypatch.setattr(generate, "CONTEXTS", {"2k": 2048, "none": 64})
    monkeypatch.setattr(generate, "BATCH", 2)
    monkeypatch.setattr(generate, "STEPS", {"2k": (1, 3), "none": (0, 1)})


@pytest.fixture
def doclm():
    return load_model(Path(__file__).parents[2] / "data" / "doclm-7m")[0]


def contexts(tokens):
    return random_contexts(random_model(SMALL), SMALL, tokens, 2, 2)


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
    assert page["kv_suffix_bytes"] == 2 * 1024 * SMALL.token_bytes and rows["full-kv"]["kv_suffix_bytes"] == 0
    speedup = page["tokens_per_second"] / rows["full-kv"]["tokens_per_second"]
    assert rows[None]["speedup_sparf_page_over_full_kv"] == speedup


def test_what_does_not_fit_memory_is_left_out(small, monkeypatch):
    monkeypatch.setattr(generate, "MEMORY_BYTES", 2 * 2048 * SMALL.token_bytes - 1)
    assert "memory" not in {row.get("case") for row in generate.run(["2k"])}


def test_parts_that_do_not_exist(small):
    with pytest.raises(CommandError, match="parts must be some of text, 2k, none, not 9k"):
        next(generate.run(["9k"]))


def test_full_kv_attends_as_the_host_engine_does(tmp_path, small, monkeypatch):
    monkeypatch.setitem(generate.POLICIES, "dense", AttentionPolicy())
    q = np.random.default_rng(3).standard_normal((2, 3, 2, 64)).astype(np.float16)
    outs, read = [], {}
    monkeypatch.setattr(generate, "MEMORY_BYTES", 2 * 192 * 4 * 3 * 64)  # a layer
    for name in ("full-kv", "full-kv-kept", "dense"):
        (tmp_path / name).mkdir()
        case = generate._Case(name, contexts(192))
        with generate._engine(tmp_path / name, case) as engine:
            assert isinstance(engine, CpuEngine if name == "dense" else FullKvEngine)
            numbers = [engine.add() for _ in range(2)]
            for layer in range(SMALL.layers):
                for number, kv in zip(numbers, case.contexts.kv(layer), strict=True):
                    engine.append(number, layer, *kv)
            for step in range(2):
                for layer in range(SMALL.layers):
                    new = np.random.default_rng([step, layer]).standard_normal((2, 2, 3, 1, 64)).astype(np.float16)
                    for number, kv in zip(numbers, new, strict=True):
                        engine.append(number, layer, *kv)
                    outs.append(engine.attend(layer, numbers, q, 0.2))
            if name != "dense":
                read[name] = engine.counters.flash_bytes["token"]
    for full, kept, dense in zip(outs[:6], outs[6:12], outs[12:], strict=True):
        np.testing.assert_allclose(full, dense, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(full, kept)
    layer = 2 * 192 * 4 * 3 * 64
    assert read == {"full-kv": 7 * layer, "full-kv-kept": 5 * layer}, "one layer ahead"


def test_full_kv_wants_whole_contexts_first(tmp_path):
    with FullKvEngine(tmp_path / "kv", SMALL, sequences=1, tokens=64) as engine:
        k = np.zeros((3, 63, 64), np.float16)
        with pytest.raises(StateError, match=r"must have the shape \(3, 64, 64\), not \(3, 63, 64\)"):
            engine.append(engine.add(), 0, k, k)


def test_stores_of_the_bench_hold_their_contexts(small, tmp_path):
    with generate._engine(tmp_path, generate._Case("sparf-page", contexts(2048))) as engine:
        assert isinstance(engine.store, KvStore)
        assert engine.store.flash.geometry.pages >= 2 * 9 * 36


def test_text_has_the_k_and_v_of_its_model_and_rows(small, doclm, monkeypatch):
    """Contexts of two texts, each sequence's own last; all the memory, so that no group is read twice."""
    monkeypatch.setattr(generate, "SHAPE", kv_shape(doclm))
    monkeypatch.setattr(generate, "LAYOUT", KvLayout(8, True, 256, IndexFormat.INT4, 4096))
    monkeypatch.setattr(generate, "load_model", lambda name: (doclm, tokenize))
    monkeypatch.setattr(generate, "text_contexts", partial(text_contexts, tokens=320))
    monkeypatch.setattr(generate, "STEPS", {"text": (2, 3)})
    rows = {row.get("case"): row for row in generate.run(["text"])}
    assert list(rows) == ["full-kv", "full-kv-kept", *generate.POLICIES, None]
    assert all(row["context"] == 640 and "320 tokens" in row["kv"] for name, row in rows.items() if name)
    assert rows["full-kv-kept"]["flash_bytes_per_token"] < rows["full-kv"]["flash_bytes_per_token"]
    read = rows["sparf-page"]["flash_bytes_by_kind"]["token"]
    assert read < 0.5 * rows["full-kv"]["flash_bytes_per_token"] / 8, "most of the groups had been read before"


def tokenize(text, verbose):
    return {"input_ids": [3 + ord(letter) % 1000 for letter in text[:5000]]}


def test_text_continues_as_the_model_does(doclm):
    """K and V of the first text alone, then a step after them: the logits of the whole text at once."""
    own = text_contexts(deepcopy(doclm), tokenize, 1, 1, tokens=40)
    cache = DynamicCache(config=doclm.config)
    for layer in range(kv_shape(doclm).layers):
        ((k, v),) = own.kv(layer)
        cache.update(torch.from_numpy(k)[None].float(), torch.from_numpy(v)[None].float(), layer)
    with torch.no_grad():
        one = doclm(own.ids, past_key_values=cache, position_ids=torch.tensor([[own.place]])).logits[0, -1]
        text = tokenize("\n\n".join(topics[name] for name in sorted(topics)), False)["input_ids"][:41]
        whole = doclm(torch.tensor([text])).logits[0, -1]
    assert torch.allclose(one, whole, atol=0.02)


def test_a_part_without_its_model_says_so(small, monkeypatch):
    def missing(name):
        raise CommandError("model smollm2 needs its weights")

    monkeypatch.setattr(generate, "load_model", missing)
    monkeypatch.setattr(generate, "STEPS", {"text": (1, 1)})
    assert list(generate.run(["text"])) == [{"part": "text", "skipped": "model smollm2 needs its weights"}]
