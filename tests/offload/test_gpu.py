"""Offloaded generation that computes on a GPU: transformers' tokens, wherever weights, KV cache and activations lie."""

import copy
import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM

from nearflash.offload import OffloadedModel, generate
from nearflash.offload.machine.measure import measure_machine
from nearflash.offload.machine.plan import crossing_fraction, model_shape
from nearflash.planning.policy import OffloadPolicy, Shares
from nearflash.weights.loading import load

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")

GPU, HOST, DISK = Shares(gpu=1), Shares(host=1), Shares(disk=1)
MIXED = Shares(gpu=0.34, host=0.33, disk=0.33)


@pytest.fixture
def on_gpu(saved):
    def load(family):
        folder, model = saved(family)
        return folder, copy.deepcopy(model).to("cuda")

    return load


@pytest.mark.parametrize("family", ["llama", "gemma2", "opt", "mixtral"])
def test_tokens_of_a_family(on_gpu, prompts, plain, tmp_path, family):
    folder, model = on_gpu(family)
    policy = OffloadPolicy(3, 2, MIXED, MIXED, MIXED)
    done = generate(folder, prompts(), policy, max_new_tokens=24, device="cuda", scratch=tmp_path)
    assert done.tokens == plain(model, prompts(), 3, 24)
    assert done.report.link_bytes["weights host to gpu"] > 0


@pytest.mark.parametrize(("weights", "cache", "activations"), [*itertools.product((GPU, HOST, DISK), repeat=3)])
def test_every_tier(on_gpu, prompts, plain, weights, cache, activations):
    folder, model = on_gpu("llama")
    rows = prompts(6)
    want = plain(model, rows, 3, 6)
    for options in ({"overlap": True}, {"overlap": False, "cpu_attention": True}, {"cpu_attention": True}):
        policy = OffloadPolicy(3, 2, weights, cache, activations, **options)
        assert generate(folder, rows, policy, max_new_tokens=6, device="cuda").tokens == want, options


@pytest.mark.parametrize("tier", [GPU, HOST, DISK], ids=["gpu", "host", "disk"])
@pytest.mark.parametrize("form", [("coded-bitmap", 16), ("bitmap", 4), ("groups", 8), ("groups", 4)], ids=str)
def test_compressed_weights_are_expanded_on_the_gpu(compressed, prompts, plain, form, tier):
    folder, rows = compressed(*form), prompts(6)
    want = plain(load(AutoModelForCausalLM, folder).to("cuda"), rows, 3, 6)
    done = generate(folder, rows, OffloadPolicy(3, 2, tier, HOST, GPU), max_new_tokens=6, device="cuda")
    assert done.tokens == want
    shape, crossing = model_shape(folder)[0], crossing_fraction(folder)
    passes = done.report.link_bytes.get("weights host to gpu", 0) / shape.weight_bytes(16, crossing)[0]
    assert passes == pytest.approx(0 if tier is GPU else 6, rel=0.02)


def test_experts_as_they_are_routed(on_gpu, prompts, plain):
    folder, model = on_gpu("mixtral")
    model.set_experts_implementation("eager")
    rows, policy = prompts(6), OffloadPolicy(3, 2, DISK, HOST, GPU)
    with OffloadedModel(folder, policy, device="cuda", expert_bytes=200_000) as opened:
        done = opened.generate(rows, max_new_tokens=8)
    assert done.tokens == plain(model, rows, 3, 8) and done.report.expert_misses


def test_a_gpu_is_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    machine = measure_machine(tmp_path)
    assert "cuda" in machine.compute.source and not machine.links.one_memory
    assert machine.compute.gpu_attention_bytes_per_s > machine.compute.host_attention_bytes_per_s
