"""Flash bytes of sparf against sparf-page, on a small model's own attention."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nearflash.model.attention.head import attend_repeated
from nearflash.verify.bench.attend_flash import (
    MODELS_VARIABLE,
    TextHeads,
    _sparf,
    _sparf_page,
    flash_rows,
    measure,
    relative_error,
)
from nearflash.verify.bench.recording import record

DATA = Path(__file__).parents[2] / "data"
MODEL = DATA / "doclm-7m"


@pytest.fixture(scope="module")
def texts():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids = tokenizer((DATA / "finetune.txt").read_text(), verbose=False)["input_ids"]
    return np.array(ids[:2048]).reshape(2, 1024)


@pytest.fixture(scope="module")
def recorded(texts):
    return list(record(MODEL, texts, (1024, 900)))


def test_recording_is_what_the_model_attends_to(texts, recorded):
    """The last layer's K, of a model that runs without us."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    with torch.no_grad():
        cache = model(torch.from_numpy(texts[1])[None], use_cache=True).past_key_values
    text = recorded[1]
    assert text.q.shape == (2, 12, 1, 128) and text.k.shape == text.v.shape == (12, 1024, 128)
    for layer in (0, 5):
        for ours, theirs in ((text.k, cache.layers[layer].keys), (text.v, cache.layers[layer].values)):
            np.testing.assert_allclose(ours[2 * layer : 2 * layer + 2], theirs[0].numpy(), rtol=2e-3, atol=2e-3)


def test_searched_attention_is_near_the_model(recorded):
    text = recorded[0].at(0, 1024)
    for settings in (_sparf(128, 1024, True), _sparf_page(128, 1024, 8)):
        ((out, chosen),) = TextHeads(text).attend([settings])
        for head in range(0, 12, 5):
            mean = text.v[head].astype(np.float64).mean(axis=0).astype(np.float32)
            exact = attend_repeated(text.q[0, head], text.k[head], text.v[head], mean, settings)
            assert (exact.chosen ^ chosen[head].numpy()).sum() <= 0.1 * exact.chosen.sum()
            assert relative_error(torch.from_numpy(exact.out).float(), out[head]).max() < 0.02


def test_rows_compare_at_equal_error(recorded):
    rows = list(measure(recorded, "doclm-7m", (1024, 900), 1))
    assert [row["mode"] for row in rows] == (["sparf"] * 4 + ["sparf-page"]) * 2
    assert [row["tokens"] for row in rows] == [1024] * 5 + [900] * 5
    for row in rows:
        assert row["heads"] == 12 and 0 < row["output_error"] < 0.5
        assert row["flash_bytes_used_per_head"] <= row["flash_bytes_asked_per_head"]
        assert (row["flash_bytes_suffix_per_head"] > 0) == (row["tokens"] == 900)
    page = rows[4]
    assert page["ratio"] > page["ratio_codewords"]
    assert page["error_to_sparf"] == page["output_error"] / rows[0]["output_error"]
    asked = min(row["flash_bytes_asked_per_head"] for row in rows[:4] if row["reads"] == "pages")
    assert page["ratio"] == asked / page["flash_bytes_asked_per_head"]


def test_a_missing_model_is_a_visible_skip(monkeypatch, tmp_path):
    monkeypatch.delenv(MODELS_VARIABLE, raising=False)
    (row,) = flash_rows()
    assert "NEARFLASH_MODELS" in row["skipped"] and row["model"] == "doclm-30m"
    monkeypatch.setenv(MODELS_VARIABLE, str(tmp_path))
    (row,) = flash_rows(model="doclm-9m")
    assert "doclm-9m" in row["skipped"]
