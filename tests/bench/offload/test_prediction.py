"""Policies drawn at random: each runs as it was drawn, and its row has what was predicted for it."""

import itertools
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from transformers import LlamaConfig

from nearflash.abi.errors import CommandError
from nearflash.bench.offload import prediction
from nearflash.planning.policy import OffloadPolicy, Shares
from nearflash.planning.profile import load_machine
from nearflash.planning.terms import Workload


@pytest.fixture
def sizes():
    return LlamaConfig(
        vocab_size=97, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, pad_token_id=0, eos_token_id=2,
    )  # fmt: skip


@pytest.fixture
def machine(monkeypatch):
    measured = []
    found = load_machine("gpu24")
    monkeypatch.setattr(prediction, "measure_machine", lambda *given: measured.append(given) or found)
    monkeypatch.setattr(prediction, "idle_processors", lambda: 1024)
    monkeypatch.setattr(prediction, "_LEAST_S", 1e-9)
    monkeypatch.setattr(prediction, "_product_rate", lambda: 100.0)
    monkeypatch.setattr("nearflash.bench.disk._PROBE_BYTES", 32 << 20)
    return measured


def test_a_seed_draws_the_same_policies_which_differ():
    drawn = [[prediction.random_policy(np.random.default_rng(seed), 6, 64) for _ in range(1)] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    random = np.random.default_rng(3)
    many = [prediction.random_policy(random, 6, 64) for _ in range(200)]
    policies = [each.policy for each in many]
    assert {each.weights for each in many} == set(prediction.FORMATS)
    for bits in ("weight_bits", "cache_bits"):
        assert {getattr(policy, bits) for policy in policies} == {4, 16}
    assert {each.attention is None for each in many} == {policy.overlap for policy in policies} == {True, False}
    for policy, workload in ((each.policy, each.workload) for each in many):
        assert policy.block_size * workload.prompt_tokens <= prediction._PREFILL_TOKENS
        assert (policy.weights.disk * 6) == pytest.approx(round(policy.weights.disk * 6)), "whole layers"
        assert policy.weight_bits == 16 or not policy.weights.disk


@pytest.mark.full
def test_each_row_has_prediction_and_measurement(sizes, machine, tmp_path):
    *rows, last = prediction.measure(tmp_path, sizes, seed=5, policies=3)
    assert len(rows) == 3 and {row["seed"] for row in (*rows, last)} == {5}
    for row in rows:
        assert row["error"] == pytest.approx(row["predicted_s_per_token"] / row["measured_s_per_token"] - 1)
        assert sum(row["measured_phases_s"]) > 0 and row["read_gb_per_s"] > 0
        assert row["peak_bytes"].keys() <= {"gpu", "host", "disk"}
    errors = [abs(row["error"]) for row in rows]
    assert last["worst_error"] == max(errors)
    assert last["error_within_10_percent"] == sum(error <= 0.1 for error in errors)
    assert last["error_above_20_percent"] == sum(error > 0.2 for error in errors)
    assert len(machine) == len({row["weights"] for row in rows}), (
        "once for each form of the weights, as nobody computes"
    )
    assert not list(tmp_path.iterdir())


def test_a_busy_machine_is_measured_before_each_policy(sizes, machine, tmp_path, monkeypatch):
    monkeypatch.setattr(prediction, "idle_processors", lambda: 0)
    rows = list(prediction.measure(tmp_path, sizes, seed=5, policies=2))
    assert len(machine) == 2 and all(row["processors_of_others"] > 0 for row in rows[:-1])


def test_a_machine_that_became_slower_is_measured_again(sizes, machine, tmp_path, monkeypatch):
    """Neighbours of a virtual machine take its processors without a trace in it."""
    rates = iter([100.0] * 3 + [50.0] * 3)
    monkeypatch.setattr(prediction, "_product_rate", lambda: next(rates))
    monkeypatch.setattr(prediction, "random_policy", partial(_same_policy, prediction.random_policy))
    first, second, last = prediction.measure(tmp_path, sizes, seed=5, policies=2)
    assert len(machine) == 2 and not next(rates, None)
    assert first["product_gflops_per_s"] == (100, 100, 100) and second["product_gflops_per_s"] == (50, 50, 50)
    assert last["steady"] == 2 and last["steady_within_10_percent"] == last["error_within_10_percent"]


@pytest.mark.parametrize(
    ("cycle", "tries", "rates"),
    [((100.0, 100.0, 50.0), 2, (100, 100, 100)), ((100.0, 50.0), 3, (75, 50, 100))],
    ids=["once", "always"],
)
def test_a_policy_beside_which_the_machine_changed_runs_again(
    sizes, machine, tmp_path, monkeypatch, cycle, tries, rates
):  # fmt: skip
    """Three times at most: then it is counted apart."""
    measured = itertools.cycle(cycle)
    monkeypatch.setattr(prediction, "_product_rate", lambda: next(measured))
    row, last = prediction.measure(tmp_path, sizes, seed=5, policies=1)
    assert (row["tries"], row["product_gflops_per_s"]) == (tries, rates)
    assert last["steady"] == (tries == 2) and last["steady_within_10_percent"] <= last["steady"]


def _same_policy(draw, random, layers, dim):
    return draw(np.random.default_rng(5), layers, dim)


def test_the_part_runs_with_the_threads_of_the_command(sizes, tmp_path, monkeypatch):
    """Threads that spin while they wait took a processor from what is expanded, and predictions had no term for it."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    text = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)])); sys.exit(sys.argv[3] == '7')"
    monkeypatch.setattr(prediction, "_COMMAND", (sys.executable, "-c", text))
    [[(path, _, seed), environment]] = prediction.measure_apart(tmp_path, sizes)
    assert (path, seed) == (str(tmp_path), "") and environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert int(environment["OMP_NUM_THREADS"]) > 0 and not list(tmp_path.iterdir())
    with pytest.raises(CommandError, match="part prediction must end with status 0, not 1"):
        list(prediction.measure_apart(tmp_path, sizes, seed=7))


def test_rows_are_printed(sizes, tmp_path, monkeypatch, capsys):
    sizes.save_pretrained(tmp_path)
    monkeypatch.setattr(prediction, "measure", lambda path, config, seed: iter([{"n": config.hidden_size, "s": seed}]))
    for seed in ("5", ""):
        prediction.main(["somewhere", str(tmp_path), seed])
    assert capsys.readouterr().out == '{"n": 128, "s": 5}\n{"n": 128, "s": null}\n'


def test_stored_and_read_bytes_are_in_what_is_predicted(sizes, machine, tmp_path):
    """An int4 file and an attention policy move what they move, as where nearflash generate plans."""
    folder = prediction._Folders(sizes, tmp_path)["int4"]
    policy = OffloadPolicy(2, 1, Shares(disk=1), Shares(disk=1), Shares(gpu=1))
    attention = prediction.random_policy(np.random.default_rng(0), 2, 32).attention or prediction.AttentionPolicy(
        "sparf-page", score_dims=8, top_k=1 / 8
    )
    drawn = prediction.RandomPolicy("int4", policy, Workload(500, 2), attention)
    found, used, _ = prediction._predict(drawn, folder, load_machine("gpu24"))
    dense, *_ = prediction._predict(replace(drawn, attention=None), folder, load_machine("gpu24"))
    assert used.stored_fraction < 0.5 and 0 < used.read_fraction < 1
    assert 0 < found.bytes_per_token["cache disk to host"] < dense.bytes_per_token["cache disk to host"]
