"""The bench of generation, with a model and contexts of a few pages."""

from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
import torch
from transformers import DynamicCache, LlamaConfig

from nearflash.abi.errors import CommandError, StateError
from nearflash.bench.inference import generate
from nearflash.bench.inference import memory_reads as memory_reads_module
from nearflash.bench.inference.contexts import random_contexts, random_model, text_contexts
from nearflash.bench.inference.decode import DecodeCase, open_case
from nearflash.bench.inference.full_kv import FullKvEngine
from nearflash.bench.inference.memory_reads import memory_reads
from nearflash.bench.inference.short_contexts import short_contexts
from nearflash.inference.engines.cpu.engine import CpuEngine
from nearflash.inference.models import kv_shape, load_model
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.storage.io.measure import Rate
from nearflash.storage.io.profile import DriveProfile
from nearflash.storage.kv import KvShape, KvStore

SMALL = KvShape(layers=3, kv_heads=3, dim=64)
CONFIG = LlamaConfig(
    hidden_size=576, intermediate_size=64, num_hidden_layers=3, num_attention_heads=9, num_key_value_heads=3,
    vocab_size=512, max_position_embeddings=4096,
)  # fmt: skip


def profile(small=1.0, large=1.0):
    """GB/s of reads of 4 KiB at random places, and of large ones."""
    sizes = [("random", 4096, small), ("random", 65536, large), ("read", 4 << 20, large)]
    return DriveProfile("now", tuple(Rate(call, size, 128, rate, rate, rate) for call, size, rate in sizes))


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(generate, "_random_model", lambda name: random_model(deepcopy(CONFIG)))
    monkeypatch.setattr(generate, "_profile", profile)
    monkeypatch.setattr(generate, "CONTEXTS", {"2k": 2048, "none": 64})
    monkeypatch.setattr(generate, "BATCH", 2)
    monkeypatch.setattr(generate, "STEPS", {"2k": (1, 3), "none": (0, 1)})


@pytest.fixture
def doclm():
    return load_model(Path(__file__).parents[2] / "data" / "doclm-7m")[0]


def contexts(tokens):
    return random_contexts(random_model(deepcopy(CONFIG)), tokens, 2, 2)


def case(name, tokens, policy=None, **more):
    return DecodeCase(name, contexts(tokens), 1 << 30, policy, profile(), **more)


def test_rows(small):
    disk, *others = generate.run(["2k"])
    assert disk["part"] == "disk" and disk["gigabytes_per_second"]["random 64 KiB x 128"] == [1.0, 1.0, 1.0]
    rows = {row.get("case"): row for row in others}
    assert list(rows) == ["full-kv", "ollm-like", "model", "memory", *generate.POLICIES, "auto", None]
    for name, row in rows.items():
        if name is not None:
            assert 0 < row["tokens_per_second_least"] <= row["tokens_per_second"] <= row["tokens_per_second_most"]
            assert row["kv_bytes"] == 2 * 2048 * SMALL.token_bytes
    full = rows["full-kv"]["flash_bytes_per_token"]
    assert full == 2048 * SMALL.token_bytes and rows["memory"]["flash_bytes_per_token"] == 0
    assert rows["ollm-like"]["flash_bytes_per_token"] == 3 * full and rows["model"]["flash_bytes_per_token"] == 0
    page = rows["sparf-page"]
    # 16 groups of 129, of which the last is not on flash, and what was read ahead besides; the index was read before.
    assert full * 15 / 128 <= page["flash_bytes_by_kind"]["token"] < 1.5 * full * 15 / 128
    assert page["flash_bytes_by_kind"]["index"] == 0
    assert page["kv_memory_bytes"] == pytest.approx(2 * full / 4, rel=0.1)  # int8, of K alone
    assert page["kv_suffix_bytes"] == 2 * 512 * SMALL.token_bytes and rows["full-kv"]["kv_suffix_bytes"] == 0
    rate, last = {name: row["tokens_per_second"] for name, row in rows.items() if name}, rows[None]
    assert last["speedup_eighth"] == rate["sparf-page"] / rate["full-kv"]
    assert last["speedup_sixteenth"] == rate["sparf-page-16th"] / rate["full-kv"]
    assert last["speedup_auto"] == rate["auto"] / rate["full-kv"] and last["auto"] == "sparf-page"
    assert 0 < last["io_roofline_fraction"] <= 1.5
    for name, fraction in last["io_roofline_fraction_by_case"].items():
        assert 0 < last["drive_fraction_by_case"][name] <= fraction
        assert 0 < last["processor_fraction_by_case"][name] <= 1.05  # clocks of a step and of the process differ


def test_pages_and_auto_are_by_the_disks_rates(small, monkeypatch):
    """Where small reads are slower, pages are larger; where they are slower than all in large reads, all is read."""
    monkeypatch.setattr(generate, "STEPS", {"2k": (0, 1)})
    for rates, page_bytes, auto in (((0.4, 1.0), 8192, "sparf-page"), ((0.05, 1.0), 8192, "dense")):
        monkeypatch.setattr(generate, "_profile", lambda rates=rates: profile(*rates))
        rows = {row.get("case"): row for row in generate.run(["2k"])}
        assert rows["sparf-page"]["page_bytes"] == page_bytes and rows["sparf"]["page_bytes"] == 4096
        assert rows["auto"]["policy"] == auto


def test_what_does_not_fit_memory_is_left_out(small, monkeypatch):
    monkeypatch.setattr(generate, "MEMORY_BYTES", 2 * 2048 * SMALL.token_bytes - 1)
    assert "memory" not in {row.get("case") for row in generate.run(["2k"])}


def test_parts_that_do_not_exist(small):
    with pytest.raises(CommandError, match="parts must be of 2k, none, not 9k"):
        next(generate.run(["9k"]))


def test_full_kv_attends_as_the_host_engine_does(tmp_path):
    q = np.random.default_rng(3).standard_normal((2, 3, 3, 64)).astype(np.float16)
    outs, read, layer_bytes = {}, {}, 2 * 192 * 4 * 3 * 64
    for name in ("full-kv", "full-kv-kept", "ollm-like", "dense"):
        (tmp_path / name).mkdir()
        own = case(name, 192, AttentionPolicy() if name == "dense" else None, keeps="kept" in name)
        with open_case(replace(own, memory_bytes=layer_bytes), tmp_path / name) as engine:
            assert isinstance(engine, CpuEngine if name == "dense" else FullKvEngine)
            numbers = [engine.add() for _ in range(2)]
            for layer in range(SMALL.layers):
                for number, kv in zip(numbers, own.contexts.kv(layer), strict=True):
                    engine.append(number, layer, *kv)
            for step in range(2):
                for layer in range(SMALL.layers):
                    new = np.random.default_rng([step, layer]).standard_normal((2, 2, 3, 1, 64)).astype(np.float16)
                    for number, kv in zip(numbers, new, strict=True):
                        engine.append(number, layer, *kv)
                    outs.setdefault(name, []).append(engine.attend(layer, numbers, q, 0.2))
            read[name] = engine.counters.flash_bytes.get("token")
    for name in ("full-kv", "ollm-like"):
        np.testing.assert_allclose(outs[name], outs["dense"], rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(outs["full-kv"], outs["full-kv-kept"])
    del read["dense"]
    # One layer ahead; but for the one that is kept; six layers when they come, once for each of three query heads.
    assert read == {"full-kv": 7 * layer_bytes, "full-kv-kept": 5 * layer_bytes, "ollm-like": 6 * 3 * layer_bytes}


def test_full_kv_wants_whole_contexts_first(tmp_path):
    with FullKvEngine(tmp_path / "kv", SMALL, sequences=1, tokens=64) as engine:
        k = np.zeros((3, 63, 64), np.float16)
        with pytest.raises(StateError, match=r"must have the shape \(3, 64, 64\), not \(3, 63, 64\)"):
            engine.append(engine.add(), 0, k, k)


def test_stores_of_the_bench_hold_their_contexts(tmp_path):
    with open_case(case("sparf-page", 2048, generate.POLICIES["sparf-page"]), tmp_path) as engine:
        assert isinstance(engine.store, KvStore)
        assert engine.store.flash.geometry.pages >= 2 * 9 * 36


def test_text_has_the_k_and_v_of_its_model_and_rows(small, doclm, monkeypatch):
    """Contexts of two texts, each sequence's own last; all the memory, so that no group is read twice."""
    monkeypatch.setattr(generate, "load_model", lambda name: (doclm, tokenize))
    monkeypatch.setattr(generate, "text_contexts", partial(text_contexts, tokens=320))
    monkeypatch.setattr(generate, "STEPS", {"text": (2, 3)})
    _, *others = generate.run(["text"])
    rows = {row.get("case"): row for row in others}
    assert list(rows) == ["full-kv", "full-kv-kept", *generate.POLICIES, "sparf-page-ahead", "kvswap", "auto", None]
    assert all(row["context"] == 640 and "320 tokens" in row["kv"] for name, row in rows.items() if name)
    assert rows["full-kv-kept"]["flash_bytes_per_token"] < rows["full-kv"]["flash_bytes_per_token"]
    read = rows["sparf-page"]["flash_bytes_by_kind"]["token"]
    assert read < 0.5 * rows["full-kv"]["flash_bytes_per_token"] / 8, "most of the groups had been read before"
    assert rows["sparf-page-ahead"]["flash_bytes_by_kind"]["token"] > 0 < rows["kvswap"]["flash_bytes_per_token"]
    rate = {name: row["tokens_per_second"] for name, row in rows.items() if name}
    assert rows[None]["speedup_text"] == rate["sparf-page"] / rate["full-kv-kept"]


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
    assert list(generate.run(["text"]))[1:] == [{"part": "text", "skipped": "model smollm2 needs its weights"}]


def test_short_contexts_are_timed_in_turn():
    """Cheap layers alone: what a token costs beside the model."""
    rows = list(short_contexts(random_model(deepcopy(CONFIG)), tokens=(20, 40), steps=3))
    assert [(row["case"], row["context"]) for row in rows] == [("idle", 20), ("idle", 40), ("busy", 20), ("busy", 40)]
    for row in rows:
        own, dynamic = row["milliseconds_a_token"], row["milliseconds_a_token_dynamic_cache"]
        assert row["short_context_fraction"] == pytest.approx(dynamic / own) and own > 0


def test_what_is_in_memory_is_attended_to_without_the_disk(monkeypatch):
    monkeypatch.setattr(memory_reads_module, "SEQUENCES", 2)
    row = memory_reads(generate.POLICIES["sparf-page"], profile(), tokens=2048)
    # 16 of 128 groups of 16 tokens, of which 64 are in memory beside; 16 of 64 dims of int8.
    assert row["bytes_a_head"]["index"] == 16 * 2048 and 0 < row["memory_read_fraction"] < 1
    assert row["bytes_a_head"]["chosen"] <= 16 * 4096
