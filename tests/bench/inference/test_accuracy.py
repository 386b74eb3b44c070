"""Rows of the accuracy bench: deltas and their errors, bytes with and without the suffix, what is skipped."""

import numpy as np
import pytest
import torch

from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.errors import CommandError
from nearflash.bench.inference.accuracy import _delta, measure, run
from nearflash.bench.inference.recommended import MODES, recommended, sweep
from nearflash.bench.inference.settings import baseline, by_policy
from nearflash.bench.inference.subjects import MODELS_VARIABLE, SUBJECTS, subject
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.inference.policy.texts import token_ids
from nearflash.storage.kv import KvLayout


@pytest.fixture
def ids():
    return torch.randint(97, (169,), generator=torch.Generator().manual_seed(6))


def test_delta_is_of_the_mean_losses():
    delta, error = _delta(np.array([1.01, 2.06]), np.array([1.0, 2.0]))
    assert delta == pytest.approx(100 * (3.07 / 3 - 1))
    assert error == pytest.approx(1.0)  # 1 % and 3 % without the one or the other
    assert _delta(np.array([1.02]), np.array([1.0]))[1] is None
    assert _delta(np.array([2.02, 1.01]), np.array([2.0, 1.0]))[1] == pytest.approx(0)


def test_rows_are_skipped_without_models(monkeypatch):
    monkeypatch.delenv(MODELS_VARIABLE, raising=False)
    rows = list(run(list(SUBJECTS)))
    assert [row["model"] for row in rows] == list(SUBJECTS) and all(MODELS_VARIABLE in row["skipped"] for row in rows)


def test_other_names_are_refused(tmp_path):
    with pytest.raises(CommandError, match=r"parts must be of SmolLM2-135M-Instruct, doclm-30m, retrieval, not gpt"):
        list(run(["gpt"]))
    with pytest.raises(CommandError, match=r"mode must be one of dense, sparq, .*, local, not 'flat'"):
        list(run(mode="flat"))
    with pytest.raises(CommandError, match="model must be one of SmolLM2-135M-Instruct, doclm-30m, not 'gpt'"):
        subject("gpt", tmp_path)


def test_rows_count_what_is_in_memory(tiny_model, ids):
    """A suffix of 22 to 41 tokens after a block of 128; dense reads all of both."""
    layout = KvLayout(16, True, 128, IndexFormat.INT4, 4096)
    settings = [by_policy(policy, layout, 16) for policy in (
        AttentionPolicy(), AttentionPolicy("sparf-page", score_dims=4, top_k=0.25, local_window=8, keep_tail=True),
    )]  # fmt: skip
    settings += [baseline("local", 0.5), baseline("h2o", 0.5)]
    rows = list(measure("tiny", tiny_model, settings, [ids, ids.flip(0)], window=20))
    dense, page, local, h2o = rows
    share = np.mean([128 / tokens for tokens in range(150, 170)])
    assert dense["flash_fraction"] == pytest.approx(share) and dense["memory_fraction"] >= 1 - share
    assert dense["delta_nll_percent"] == 0 and dense["texts"] == 2 and dense["tokens"] == 169
    assert page["index_fraction"] + page["gather_fraction"] == page["flash_fraction"] < 0.6
    assert page["flash_fraction_indexed"] == pytest.approx(page["flash_fraction"] / share)
    assert page["memory_fraction"] > dense["memory_fraction"]  # K of the suffix is read for the scan, too
    for row in (local, h2o):
        assert row["flash_fraction"] == 0 and row["memory_fraction"] == pytest.approx(0.5, abs=0.01)


def test_files_are_cut_to_their_beginning(tmp_path):
    class Words:
        def __call__(self, text, verbose):
            return {"input_ids": [len(word) for word in text.split()]}

    (tmp_path / "long").write_text("ab c " * 4096)
    (tmp_path / "short").write_text("ab c")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    assert next(token_ids(Words(), [tmp_path / "long"], 4096)).tolist() == [2, 1] * 2048
    for name, match in (("short", "4096 tokens at least, not the 2 of"), ("latin", "UTF-8"), ("none", "No such file")):
        with pytest.raises(CommandError, match=match):
            next(token_ids(Words(), [tmp_path / name], 4096))


def test_every_mode_has_a_setting(tiny_model):
    config = tiny_model.config
    assert [recommended(config, mode).mode for mode in MODES] == [str(mode) for mode in MODES]
    assert {setting.mode for setting in sweep(config)} == set(MODES) - {"dense", "sparq"}
