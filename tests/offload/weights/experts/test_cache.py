"""Experts read as they are routed: tokens equal transformers', within a budget."""

import copy
import json
import os
import threading

import pytest
import torch

from nearflash.abi.errors import WeightsError
from nearflash.offload import OffloadedModel, generate
from nearflash.offload.weights.experts.counts import COUNTS_FILE
from nearflash.offload.weights.experts.mixture import MixtureLayer
from nearflash.planning.policy import OffloadPolicy, Shares

GPU, HOST, DISK = Shares(gpu=1), Shares(host=1), Shares(disk=1)


def eager(model, plain, *args):
    model.set_experts_implementation("eager")
    return plain(model, *args)


@pytest.mark.parametrize("family", ["mixtral", pytest.param("qwen3_moe", marks=pytest.mark.full), "gpt_oss"])
@pytest.mark.parametrize("slots", [2, pytest.param(5, marks=pytest.mark.full), 100])
def test_tokens_are_those_of_transformers(mixture, prompts, plain, family, slots, expert_buffer, policy):
    folder, model = mixture(family)
    rows = prompts(6)
    size = expert_buffer(folder)
    for overlap in (True, False):
        (folder / COUNTS_FILE).unlink(missing_ok=True)
        done = generate(folder, rows, policy(overlap=overlap), max_new_tokens=8, expert_bytes=slots * size)
        assert done.tokens == eager(model, plain, rows, 3, 8)
        report = done.report
        asked = report.expert_hits + report.experts_ahead + report.expert_misses
        assert asked > 0 and report.expert_misses > 0
        if not overlap:
            assert not report.experts_ahead
        if slots == 100:
            assert report.link_bytes["experts disk to host"] <= 4 * 8 * size, "each once"
            assert report.expert_hit_rate > 0.7


def test_only_routed_experts_are_read(mixture, prompts, expert_buffer):
    """One sequence, one token a step: two of eight experts a layer."""
    folder, model = mixture("mixtral")
    rows, size = prompts(1, shortest=1, longest=2), expert_buffer(folder)
    one = OffloadPolicy(1, 1, DISK, HOST, GPU, overlap=False)
    done = generate(folder, rows, one, max_new_tokens=8, stop_tokens=[], expert_bytes=2 * size)
    steps = 8
    assert done.report.link_bytes["experts disk to host"] <= steps * 4 * 2 * size
    layers = sum(p.numel() * 4 for p in model.model.layers.parameters())
    whole = generate(folder, rows, one, max_new_tokens=8, stop_tokens=[]).report.link_bytes["weights disk to host"]
    assert whole >= steps * layers
    both = done.report.link_bytes["experts disk to host"] + done.report.link_bytes["weights disk to host"]
    assert both < 0.6 * whole


@pytest.mark.parametrize("overlap", [True, False])
def test_the_budget_is_kept(mixture, prompts, overlap, expert_buffer, policy):
    folder, _ = mixture("qwen3_moe")
    size = expert_buffer(folder)
    few, more = (
        generate(folder, prompts(4), policy(overlap=overlap), max_new_tokens=4, expert_bytes=count * size).report
        for count in (3, 9)
    )
    assert more.peak_bytes["gpu"] - few.peak_bytes["gpu"] == 6 * size
    if not overlap:  # with it, wrong guesses are read too, as many as the machine has time for
        assert more.link_bytes["experts disk to host"] < few.link_bytes["experts disk to host"]


def test_hot_experts_stay(mixture, prompts, expert_buffer, policy):
    """With counts that favour some, those are read once however often others pass."""
    folder, _ = mixture("mixtral")
    size = expert_buffer(folder)
    counts = [[10**6 if expert < 2 else 0 for expert in range(8)] for _ in range(4)]
    (folder / COUNTS_FILE).write_text(json.dumps({"layers": [[n, 8] for n in range(4)], "counts": counts}))
    with OffloadedModel(folder, policy(overlap=False), expert_bytes=12 * size) as model:
        model.generate(prompts(6), max_new_tokens=12, stop_tokens=[])
        resident = {slot.key for slot in model.experts._slots}
        assert {(layer, expert) for layer in range(4) for expert in range(2)} <= resident


def test_mixed_tiers(mixture, prompts, plain, expert_buffer):
    """Layers that stay in memory keep their experts whole."""
    folder, model = mixture("qwen3_moe")
    rows, size = prompts(6), expert_buffer(folder)
    mixed = OffloadPolicy(3, 2, Shares(gpu=0.25, host=0.25, disk=0.5), HOST, GPU)
    done = generate(folder, rows, mixed, max_new_tokens=10, expert_bytes=4 * size)
    assert done.tokens == eager(model, plain, rows, 3, 10)


def test_in_half_precision_per_expert_tensors_become_one_matrix(mixture, prompts, plain, expert_buffer, policy):
    folder, model = mixture("mixtral", hidden_size=128)
    half = copy.deepcopy(model).to(torch.bfloat16)
    half.save_pretrained(folder)
    rows = prompts(3)
    done = generate(folder, rows, policy(), max_new_tokens=8, expert_bytes=6 * expert_buffer(folder))
    assert done.tokens == eager(half, plain, rows, 3, 8)


def test_likely_experts_of_the_next_layer_are_read_ahead(mixture, prompts, plain, expert_buffer):
    """A sequence's single tokens: the next layer's router, asked early, names many of those it will name."""
    folder, model = mixture("mixtral")
    rows, size = prompts(1, shortest=1, longest=2), expert_buffer(folder)
    found = {}
    for overlap in (True, False):
        (folder / COUNTS_FILE).unlink(missing_ok=True)
        one = OffloadPolicy(1, 1, DISK, HOST, GPU, overlap=overlap)
        done = generate(folder, rows, one, max_new_tokens=24, stop_tokens=[], expert_bytes=10 * size)
        found[overlap] = done.report
        assert done.tokens == eager(model, plain, rows, 1, 24, ())
    asked = [r.expert_hits + r.experts_ahead + r.expert_misses for r in found.values()]
    assert asked == [24 * 4 * 2] * 2, "two experts of four layers a token"
    assert found[True].expert_misses < found[False].expert_misses


@pytest.mark.full
def test_guesses_that_were_wrong_are_withdrawn(mixture, prompts, plain, monkeypatch, expert_buffer, policy):
    """The next layer's router is asked early, and names the wrong ones: only time is lost."""
    folder, model = mixture("mixtral")
    rows, size = prompts(4), expert_buffer(folder)
    likely, wrong = MixtureLayer.likely_experts, []

    def others(mixture, hidden_states):
        named = likely(mixture, hidden_states)
        wrong.extend(number for number in range(8) if number not in named)
        return [number for number in range(8) if number not in named]

    monkeypatch.setattr(MixtureLayer, "likely_experts", others)
    for slots in (2, 3, 12):
        done = generate(folder, rows, policy(1, 2), max_new_tokens=10, expert_bytes=slots * size)
        assert done.tokens == eager(model, plain, rows, 1, 10)
    assert wrong


def test_an_expert_that_cannot_be_read_is_reported(mixture, prompts, expert_buffer, policy):
    folder, _ = mixture("gpt_oss")
    size = expert_buffer(folder)
    with OffloadedModel(folder, policy(), expert_bytes=4 * size) as model:
        file = folder / "model.safetensors"
        os.truncate(file, file.stat().st_size // 3)
        for _ in range(2):
            with pytest.raises(WeightsError, match="it was changed while it was in use"):
                model.generate(prompts(3), max_new_tokens=4)
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith(("nearflash-experts", "nearflash-read", "batch"))]
