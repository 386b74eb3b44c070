"""Cases of decoding: what each keeps, reads and leaves behind."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from nearflash.abi.errors import CommandError, UnsupportedError
from nearflash.bench.inference.contexts import random_contexts, random_model, text_contexts
from nearflash.bench.inference.decode import DecodeCase, measure, open_case
from nearflash.bench.inference.full_kv import FullKvEngine
from nearflash.inference.policy.policy import AttentionMode, AttentionPolicy
from nearflash.storage.io.measure import Rate
from nearflash.storage.io.profile import DriveProfile

CONFIG = LlamaConfig(
    hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, vocab_size=128, max_position_embeddings=4096,
)  # fmt: skip
PROFILE = DriveProfile("now", tuple(Rate(call, 1 << 16, 128, 1.0, 1.0, 1.0) for call in ("read", "random")))
EIGHTH = AttentionPolicy(AttentionMode.SPARF_PAGE, score_dims=8, top_k=1 / 8, local_window=16)


@pytest.fixture
def contexts():
    return random_contexts(random_model(deepcopy(CONFIG)), 600, 3, 4)


def test_contexts_are_alike_every_time_and_differ_by_layer_and_sequence(contexts):
    first, again = list(contexts.kv(0)), list(contexts.kv(0))
    assert all(
        np.array_equal(a, b) for one, other in zip(first, again, strict=True) for a, b in zip(one, other, strict=True)
    )
    assert len(first) == contexts.batch == 3 and first[0][0].shape == (2, 600, 16) and contexts.group == 2
    other = next(contexts.kv(1))
    assert not np.array_equal(first[0][0], first[1][0]) and not np.array_equal(first[0][0], other[0])
    assert "2 layers, 4 query and 2 KV heads of 16" in contexts.about["model"]


def test_models_that_are_not_all_full_attention_are_rejected():
    mixed = deepcopy(CONFIG)
    mixed.layer_types = ["full_attention", "sliding_attention"]
    mixed.sliding_window = 32
    with pytest.raises(UnsupportedError, match="full attention in every layer"):
        random_model(mixed)


def test_texts_are_as_long_as_the_models_positions(contexts):
    model = random_model(deepcopy(CONFIG)).float()
    model.config.max_position_embeddings = 80

    def tokenize(text, verbose):
        return {"input_ids": [ord(letter) % 128 for letter in text[:1000]]}

    own = text_contexts(model, tokenize, 2, 16)
    assert own.tokens == 2 * 64 and own.place == 64 and "texts of 64 tokens" in own.about["kv"]
    with pytest.raises(CommandError, match="texts must have 1600 tokens in all, not 1000"):
        text_contexts(random_model(deepcopy(CONFIG)).float(), tokenize, 2, 400, tokens=400)


@pytest.mark.parametrize(
    ("name", "policy", "keeps"),
    [("full-kv", None, False), ("full-kv-kept", None, True), ("ollm-like", None, False), ("memory", None, False),
     ("model", None, False), ("eighth", EIGHTH, False), ("eighth", EIGHTH, True), ("dense", AttentionPolicy(), True)],
)  # fmt: skip
def test_rows_say_what_was_read_and_kept(contexts, name, policy, keeps):
    case = DecodeCase(name, contexts, 1 << 24, policy, PROFILE, keeps=keeps)
    threads = torch.get_num_threads()
    row = measure(case, 1, 2)
    assert torch.get_num_threads() == threads
    assert row["case"] == name and row["steps"] == 2 and row["batch"] == 3 and row["context"] == 600
    assert row["kv_bytes"] == 3 * 600 * contexts.shape.token_bytes
    assert ("policy" in row) == (policy is not None)
    read = row["flash_bytes_per_token"] / (600 * contexts.shape.token_bytes)
    most = {"full-kv": 1, "full-kv-kept": 0.5, "ollm-like": 2, "memory": 0, "model": 0, "eighth": 0.3, "dense": 1.1}
    assert read <= most[name] * 1.03
    if name in ("full-kv", "ollm-like"):
        assert read == pytest.approx(most[name], rel=0.02)


def test_a_step_that_fails_gives_threads_back(contexts, monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.setattr(FullKvEngine, "attend", lambda *args, **options: 1 / 0)
    torch.set_num_threads(2)
    try:
        with pytest.raises(ZeroDivisionError):
            measure(DecodeCase("full-kv", contexts, 0), 0, 1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_files_are_large_enough_for_the_contexts_and_the_steps(contexts, tmp_path):
    case = DecodeCase("eighth", contexts, 1 << 20, EIGHTH, PROFILE)
    with open_case(case, tmp_path) as engine:
        for _ in range(contexts.batch):
            number = engine.add()
            for layer in range(2):
                k = np.zeros((2, 610, 16), np.float16)
                engine.append(number, layer, k, k)
        engine.store.flush()
        assert set(engine.lengths.values()) == {610}
