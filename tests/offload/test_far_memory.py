"""Offloaded generation where what computes has a memory of its own beside the host's: a link between two of a CPU.

Tokens are transformers' own, wherever weights, KV cache and activations lie, and nothing is computed in host memory.
"""

from functools import partial

import pytest
import torch

from nearflash.offload import OffloadedModel, generate, generation
from nearflash.offload.cache.host_attention import HostAttention
from nearflash.offload.machine.plan import crossing_fraction, model_shape
from nearflash.offload.tiers.link import DeviceLink
from nearflash.planning.policy import OffloadPolicy, Shares

GPU, HOST, DISK = Shares(gpu=1), Shares(host=1), Shares(disk=1)
MIXED = Shares(gpu=0.34, host=0.33, disk=0.33)


class ForgetfulLink(DeviceLink):
    """Staging buffers of the host lose their bytes once they have crossed."""

    def push(self, what, host, far, spans=None):
        super().push(what, host, far, spans)
        if host.untyped_storage().data_ptr() in self.staging:
            host.fill_(0xFF)

    def buffer(self, size_bytes, staged_bytes=None):
        made = super().buffer(size_bytes, staged_bytes)
        self.staging.add(made.host.untyped_storage().data_ptr())
        return made

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.staging = set()


@pytest.fixture(autouse=True)
def apart(monkeypatch):
    monkeypatch.setattr(generation, "DeviceLink", partial(DeviceLink, one_memory=False))


@pytest.mark.parametrize(
    "family", ["gemma2", *(pytest.param(name, marks=pytest.mark.full) for name in ("llama", "opt", "mixtral"))]
)
def test_tokens_of_a_family(saved, prompts, plain, tmp_path, family):
    folder, model = saved(family)
    own = OffloadPolicy(3, 2, MIXED, MIXED, MIXED)
    done = generate(folder, prompts(), own, max_new_tokens=24, scratch=tmp_path)
    assert done.tokens == plain(model, prompts(), 3, 24)
    assert {f"{what} {way}" for what in ("weights", "cache", "activations") for way in ("host to gpu", "gpu to host")
            if f"{what} {way}" != "weights gpu to host"} <= done.report.link_bytes.keys()  # fmt: skip


@pytest.mark.parametrize(
    ("family", "overlap"),
    [("gemma2", True), *(pytest.param(*each, marks=pytest.mark.full) for each in (("gpt_oss", True), ("opt", True),
                                                                                 ("llama", False), ("mixtral", True)))],
)  # fmt: skip
def test_the_host_attends_to_what_lies_there(saved, prompts, plain, tmp_path, family, overlap):
    """In its memory and from disk: windows, softcaps, sinks; prompts of unequal lengths: a mask comes once a pass."""
    folder, model = saved(family)
    own = OffloadPolicy(3, 2, MIXED, MIXED, MIXED, overlap=overlap, cpu_attention=True)
    rows = prompts()
    with OffloadedModel(folder, own, scratch=tmp_path) as opened:
        done = opened.generate(rows, max_new_tokens=24)
        assert opened.model.config._attn_implementation == "near_storage"
        assert opened.ledger.timeline.seconds["attend on host"] > 0
    assert done.tokens == plain(model, rows, 3, 24)
    moved = done.report.link_bytes
    assert moved["cache host to gpu"] < moved["cache gpu to host"] and moved["masks gpu to host"] < 10_000


@pytest.mark.parametrize("tier", [HOST, DISK], ids=["host", "disk"])
def test_the_host_attends_in_fp16(saved, prompts, tmp_path, monkeypatch, tier):
    """By compiled loops: to rows of a head in its memory, to those of a token in buffers of what comes from disk."""
    folder, rows = saved("llama")[0], prompts(6)
    own = OffloadPolicy(3, 2, GPU, tier, GPU, cpu_attention=True)
    options = {"max_new_tokens": 12, "dtype": torch.float16, "scratch": tmp_path}
    found = generate(folder, rows, own, **options).tokens
    monkeypatch.setattr(generation, "DeviceLink", DeviceLink)
    assert found == generate(folder, rows, OffloadPolicy(3, 2, GPU, GPU, GPU), **options).tokens


def test_what_crosses_for_attention_on_the_host(saved, prompts):
    """To the byte: a prompt's keys and values once, then of each token a query, a key, a value down, an output up."""
    folder, _ = saved("llama")
    rows = prompts(4, longest=20, shortest=19)
    own = OffloadPolicy(2, 2, GPU, HOST, GPU, cpu_attention=True)
    done = generate(folder, rows, own, max_new_tokens=5, stop_tokens=[])
    heads, tokens, dim = 4, 4 * len(rows), 64 * 4  # of queries; layers by sequences; bytes
    assert len({len(row) for row in rows}) == 1
    assert done.report.link_bytes == {
        "cache gpu to host": tokens * dim * (2 * 2 * len(rows[0]) + 4 * (heads + 2 * 2)),
        "cache host to gpu": tokens * dim * 4 * heads,
    }


def test_a_prompt_that_has_not_come_down_is_an_error(saved, prompts, monkeypatch):
    def full(*_):
        raise RuntimeError("the copy failed")

    folder, _ = saved("llama")
    monkeypatch.setattr(HostAttention, "land", full)
    with pytest.raises(RuntimeError, match="the copy failed"):
        generate(folder, prompts(6), OffloadPolicy(3, 2, GPU, HOST, GPU, cpu_attention=True), max_new_tokens=4)


def test_a_model_with_attention_of_its_own_attends_on_the_gpu(saved, prompts, plain, monkeypatch):
    folder, model = saved("llama")
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", classmethod(lambda cls: False))
    own = OffloadPolicy(3, 2, GPU, HOST, GPU, cpu_attention=True)
    with OffloadedModel(folder, own) as opened:
        assert opened.generate(prompts(6), max_new_tokens=4).tokens == plain(model, prompts(6), 3, 4)
        assert opened.ledger.links["cache host to gpu"] > opened.ledger.links["cache gpu to host"]


@pytest.mark.parametrize("options", [{"overlap": True}, {"overlap": False, "cpu_attention": True}], ids=str)
@pytest.mark.parametrize("weights", [HOST, DISK], ids=["host", "disk"])
def test_nothing_is_computed_where_it_was_staged(saved, prompts, plain, tmp_path, monkeypatch, weights, options):
    monkeypatch.setattr(generation, "DeviceLink", partial(ForgetfulLink, one_memory=False))
    folder, model = saved("llama")
    own = OffloadPolicy(3, 2, weights, MIXED, DISK, **options)
    done = generate(folder, prompts(6), own, max_new_tokens=6, scratch=tmp_path)
    assert done.tokens == plain(model, prompts(6), 3, 6)


@pytest.mark.parametrize("tier", [GPU, HOST], ids=["gpu", "host"])
def test_weights_that_are_quantised_when_loaded_cross_as_codes(saved, prompts, monkeypatch, tier):
    folder, _ = saved("llama")
    own = OffloadPolicy(3, 2, tier, GPU, GPU, weight_bits=4)
    found = generate(folder, prompts(6), own, max_new_tokens=6)
    monkeypatch.setattr(generation, "DeviceLink", DeviceLink)
    assert found.tokens == generate(folder, prompts(6), own, max_new_tokens=6).tokens
    groups = (2 * 256 + 2 * 128 + 2 * 96) + 64 * 2  # of a layer: rows of 64, and of 96
    codes = (2 * 256 * 64 + 2 * 128 * 64 + 3 * 96 * 64) // 2
    crossed = found.report.link_bytes.get("weights host to gpu", 0)
    assert crossed == (0 if tier is GPU else 6 * 4 * (codes + 4 * groups + 2 * 64 * 4))


def test_experts_as_they_are_routed(saved, prompts, plain):
    folder, model = saved("mixtral")
    rows, own = prompts(6), OffloadPolicy(3, 2, DISK, HOST, GPU)
    model.set_experts_implementation("eager")
    with OffloadedModel(folder, own, expert_bytes=200_000) as opened:
        done = opened.generate(rows, max_new_tokens=8)
    assert done.tokens == plain(model, rows, 3, 8) and done.report.expert_misses
    moved = done.report.link_bytes
    assert 0 < moved["experts host to gpu"] <= moved["experts disk to host"]


def test_a_window_crosses_alone(saved, prompts):
    """Of keys and values, what new tokens see."""
    folder, model = saved("gemma2")
    rows = prompts(2, longest=40, shortest=39)
    own = OffloadPolicy(2, 1, GPU, HOST, GPU)
    done = generate(folder, rows, own, max_new_tokens=5, stop_tokens=[])
    width, token = max(map(len, rows)), 2 * 2 * 2 * 32 * 4  # sequences, K and V, heads, dims in fp32
    windows = [16 if kind == "sliding_attention" else None for kind in model.config.layer_types]
    loaded = sum(min(width + step, (window or 999) - 1) for window in windows for step in range(4))
    assert done.report.link_bytes["cache host to gpu"] == loaded * token
    assert done.report.link_bytes["cache gpu to host"] == 4 * (width + 4) * token


def test_parameters_are_of_the_far_memory(saved, prompts, monkeypatch):
    """Of every layer in its visit, and of what lies outside of the layers."""
    placed = []

    class Recorder(DeviceLink):
        def far_memory(self, size_bytes):
            placed.append(super().far_memory(size_bytes))
            return placed[-1]

        def place(self, what, value):
            placed.append(super().place(what, value))
            return placed[-1]

    monkeypatch.setattr(generation, "DeviceLink", partial(Recorder, one_memory=False))
    folder, _ = saved("llama")
    with OffloadedModel(folder, OffloadPolicy(2, 1, MIXED, GPU, GPU)) as opened:
        theirs = {each.untyped_storage().data_ptr() for each in placed}
        seen = []

        def look(layer, *_):  # which has its weights by then
            seen.extend(each.untyped_storage().data_ptr() in theirs for each in layer.parameters())

        for layer in opened.skeleton.layers:
            layer.mlp.register_forward_pre_hook(partial(look, layer))
        with torch.no_grad(), opened.call_by_layer() as model:
            model(torch.tensor([[5, 6, 7]]))
        outside = [each for each in opened.model.parameters() if not each.is_meta]
        assert outside and all(each.untyped_storage().data_ptr() in theirs for each in outside)
    assert len(seen) == 4 * 9 and all(seen)


@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("mixtral", marks=pytest.mark.full)])
def test_what_crosses_of_small_matrices_is_the_plans_to_the_byte(compressed, prompts, monkeypatch, family):
    """Vectors lie between matrices of less than a block, and experts are parts of one parameter."""
    folder, own = compressed("groups", 4, family), OffloadPolicy(3, 2, DISK, GPU, GPU)
    found = generate(folder, prompts(6), own, max_new_tokens=6)
    shape, _ = model_shape(folder)
    planned = 6 * shape.weight_bytes(16, crossing_fraction(folder))[0]
    assert found.report.link_bytes["weights host to gpu"] == pytest.approx(planned, abs=1)
    monkeypatch.setattr(generation, "DeviceLink", DeviceLink)
    assert found.tokens == generate(folder, prompts(6), own, max_new_tokens=6).tokens
