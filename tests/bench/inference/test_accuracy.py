"""Rows of the accuracy bench: deltas and their errors, bytes with and without the suffix, what is skipped."""

from pathlib import Path

import numpy as np
import pytest
import torch

from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.errors import CommandError
from nearflash.bench.inference.accuracy import measure, run
from nearflash.bench.inference.losses import loss_delta
from nearflash.bench.inference.recommended import MODES, every_setting, recommend
from nearflash.bench.inference.settings import baseline, by_policy
from nearflash.bench.inference.texts import extend_positions, manual_pieces
from nearflash.inference.calibration.texts import beginnings
from nearflash.inference.models import load_model
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.storage.kv import KvLayout

DOCLM = str(Path(__file__).parents[2] / "data" / "doclm-7m")


@pytest.fixture
def ids():
    return torch.randint(97, (169,), generator=torch.Generator().manual_seed(6))


def test_delta_is_of_the_mean_losses():
    delta, error = loss_delta(np.array([1.01, 2.06]), np.array([1.0, 2.0]))
    assert delta == pytest.approx(100 * (3.07 / 3 - 1))
    assert error == pytest.approx(1.0)  # 1 % and 3 % without the one or the other
    assert loss_delta(np.array([1.02]), np.array([1.0]))[1] is None
    assert loss_delta(np.array([2.02, 1.01]), np.array([2.0, 1.0]))[1] == pytest.approx(0)


def test_without_the_model_nothing_is_measured():
    (row,) = run(model="none")
    assert "folder with a config.json, not 'none'" in row["skipped"]


def test_what_cannot_be_measured_is_refused(tmp_path):
    with pytest.raises(CommandError, match="parts must be of policy, sweep, retrieval, together, kvswap, not gpt"):
        list(run(["gpt"]))
    with pytest.raises(CommandError, match=r"mode must be one of dense, sparq, .*, local, not 'flat'"):
        list(run(mode="flat"))
    with pytest.raises(CommandError, match="tokens must be more than 256, those that are measured, not 200"):
        list(run(tokens=[4096, 200]))


@pytest.mark.full
def test_a_users_model_on_its_own_texts_at_several_lengths(tmp_path):
    """Beyond the model's positions these are scaled, and the rows have how; without files the manual is read."""
    (tmp_path / "text").write_text("The old bridge had to be mended in the spring of that year. " * 60)
    rows = list(run(["policy"], DOCLM, texts=[tmp_path / "text"], tokens=[400, 300]))
    assert [row["tokens"] for row in rows] == [300, 400] and all(row["texts"] == 1 for row in rows)
    assert all(row["rope"]["rope_type"] == "default" and "uniform" in row["policy"] for row in rows)
    by_mode = list(run(["policy"], DOCLM, mode="dense", tokens=[300]))
    assert by_mode[0]["delta_nll_percent"] == 0 and by_mode[0]["texts"] == 4


def test_positions_are_scaled_where_they_do_not_suffice():
    model, _ = load_model(DOCLM)
    before = model.get_decoder().rotary_emb.inv_freq.clone()
    assert extend_positions(model, 4096)["rope_type"] == "default"
    assert torch.equal(model.get_decoder().rotary_emb.inv_freq, before)
    scaled = extend_positions(model, 10000)
    assert scaled["rope_type"] == "yarn" and scaled["factor"] == 3
    assert not torch.equal(model.get_decoder().rotary_emb.inv_freq, before)
    assert model.config.max_position_embeddings == 10000
    again = extend_positions(model, 20000)  # was scaled as if it had been made for 10,000
    assert again["factor"] == 5 and again["original_max_position_embeddings"] == 4096
    assert extend_positions(model, 4096) == again


def test_pieces_of_the_manual_follow_one_another():
    def characters(text, verbose):
        return {"input_ids": [ord(letter) for letter in text]}

    pieces = manual_pieces(characters, 3, 50)
    assert pieces.shape == (3, 50) and torch.equal(pieces.reshape(1, 150), manual_pieces(characters, 1, 150))
    with pytest.raises(CommandError, match="tokens in all, not"):
        manual_pieces(characters, 1, 1 << 30)


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


def test_bytes_of_some_positions_are_those_of_all_nearly(tiny_model, ids):
    layout, policy = KvLayout(16, True, 128, IndexFormat.INT4, 4096), AttentionPolicy("sparf-page", top_k=0.25)
    every, some = (by_policy(policy, layout, 16, counted) for counted in (1, 5))
    one, other = measure("tiny", tiny_model, [every, some], [ids], window=20)
    assert one["nll"] == other["nll"] and one["flash_fraction"] != other["flash_fraction"]
    assert other["flash_fraction"] == pytest.approx(one["flash_fraction"], rel=0.1)


def test_files_are_cut_to_their_beginning(tmp_path):
    class Words:
        def __call__(self, text, verbose):
            return {"input_ids": [len(word) for word in text.split()]}

    (tmp_path / "long").write_text("ab c " * 4096)
    (tmp_path / "short").write_text("ab c")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    assert next(beginnings(Words(), [tmp_path / "long"], 4096)).tolist() == [2, 1] * 2048
    for name, match in (("short", "4096 tokens at least, not the 2 of"), ("latin", "UTF-8"), ("none", "No such file")):
        with pytest.raises(CommandError, match=match):
            next(beginnings(Words(), [tmp_path / name], 4096))


def test_every_mode_has_a_setting(tiny_model):
    config = tiny_model.config
    assert [recommend(config, mode).mode for mode in MODES] == [str(mode) for mode in MODES]
    assert {setting.mode for setting in every_setting(config)} == set(MODES) - {"dense", "sparq", "kvswap"}
