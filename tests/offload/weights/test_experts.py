"""Experts read as they are routed: tokens equal transformers', within a budget."""

import copy
import json
import os
import stat
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from nearflash.abi.errors import CommandError, StateError, WeightsError
from nearflash.offload import OffloadedModel, generate
from nearflash.offload.tiers.link import host_memory
from nearflash.offload.weights.experts import COUNTS_FILE, ExpertCache, _of_expert, _with_row_checksums
from nearflash.offload.weights.layout import Layout, LayoutReader
from nearflash.planning.policy import OffloadPolicy, Shares
from nearflash.verify.fixtures.files import rot
from nearflash.weights import PackedTensor, read_file, write_file
from nearflash.weights.sources import Piece, Source

GPU, HOST, DISK = Shares(gpu=1), Shares(host=1), Shares(disk=1)
FAMILIES = ["mixtral", "qwen3_moe", "gpt_oss"]


@pytest.fixture
def mixture(saved, tmp_path):
    """A family's model in a folder of its own, and bytes of one expert as a buffer holds it."""

    def make(family, **changes):
        _, model = saved(family, **changes)
        folder = tmp_path / family
        model.save_pretrained(folder)
        return folder, model

    return make


def policy(batch_size=3, num_batches=2, **options):
    return OffloadPolicy(batch_size, num_batches, DISK, HOST, GPU, **options)


def eager(model, plain, *args):
    model.set_experts_implementation("eager")
    return plain(model, *args)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("slots", [2, 5, 100])
def test_tokens_are_those_of_transformers(mixture, prompts, plain, family, slots):
    folder, model = mixture(family)
    rows = prompts(6)
    size = expert_buffer(folder)
    for overlap in (True, False):
        (folder / COUNTS_FILE).unlink(missing_ok=True)
        done = generate(folder, rows, policy(overlap=overlap), max_new_tokens=12, expert_bytes=slots * size)
        assert done.tokens == eager(model, plain, rows, 3, 12)
        report = done.report
        asked = report.expert_hits + report.experts_ahead + report.expert_misses
        assert asked > 0 and report.expert_misses > 0
        if not overlap:
            assert not report.experts_ahead
        if slots == 100:
            assert report.link_bytes["experts disk to host"] <= 4 * 8 * size, "each once"
            assert report.expert_hit_rate > 0.7


def expert_buffer(folder):
    """Bytes of memory of one expert."""
    with pytest.raises(CommandError, match="for two experts") as refused:
        OffloadedModel(folder, policy(), expert_bytes=1)
    return int(str(refused.value).split("must be ")[1].split()[0]) // 2


def test_only_routed_experts_are_read(mixture, prompts):
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
def test_the_budget_is_kept(mixture, prompts, overlap):
    folder, _ = mixture("qwen3_moe")
    size = expert_buffer(folder)
    few, more = (
        generate(folder, prompts(4), policy(overlap=overlap), max_new_tokens=4, expert_bytes=count * size).report
        for count in (3, 9)
    )
    assert more.peak_bytes["gpu"] - few.peak_bytes["gpu"] == 6 * size
    if not overlap:  # with it, wrong guesses are read too, as many as the machine has time for
        assert more.link_bytes["experts disk to host"] < few.link_bytes["experts disk to host"]


def test_counts_are_kept_beside_the_model(mixture, prompts):
    folder, _ = mixture("mixtral")
    size = expert_buffer(folder)
    rows = prompts(3)
    generate(folder, rows, policy(), max_new_tokens=6, stop_tokens=[], expert_bytes=4 * size)
    file = folder / COUNTS_FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    found = json.loads(file.read_text())
    tokens = sum(3 * max(map(len, rows)) if step == 0 else 3 for step in range(6))
    assert [sum(row) for row in found["counts"]] == [2 * tokens] * 4, (
        "two of each token, padding included, in each layer"
    )
    generate(folder, rows, policy(), max_new_tokens=6, stop_tokens=[], expert_bytes=4 * size)
    again = json.loads(file.read_text())
    assert sum(map(sum, again["counts"])) > sum(map(sum, found["counts"])), "half of the old ones, and the new ones"


def test_hot_experts_stay(mixture, prompts):
    """With counts that favour some, those are read once however often others pass."""
    folder, _ = mixture("mixtral")
    size = expert_buffer(folder)
    counts = [[10**6 if expert < 2 else 0 for expert in range(8)] for _ in range(4)]
    (folder / COUNTS_FILE).write_text(json.dumps({"layers": [[n, 8] for n in range(4)], "counts": counts}))
    with OffloadedModel(folder, policy(overlap=False), expert_bytes=12 * size) as model:
        model.generate(prompts(6), max_new_tokens=12, stop_tokens=[])
        resident = {slot.key for slot in model.experts._slots}
        assert {(layer, expert) for layer in range(4) for expert in range(2)} <= resident


@pytest.mark.parametrize(
    ("text", "message"), [("{", "readable JSON file .*: remove it"), ('{"layers": []}', "must be an object"), (
        '{"layers": [[0, 8], [1, 8], [2, 8], [3, 8]], "counts": [[1]]}', "must have 4 rows")]
)  # fmt: skip
def test_damaged_counts_are_reported(mixture, prompts, text, message):
    folder, _ = mixture("mixtral")
    (folder / COUNTS_FILE).write_text(text)
    with pytest.raises(StateError, match=message):
        OffloadedModel(folder, policy(), expert_bytes=1 << 20)


def test_counts_of_other_layers_are_not_used(mixture, prompts):
    folder, _ = mixture("mixtral")
    (folder / COUNTS_FILE).write_text('{"layers": [[0, 8]], "counts": [[1, 1, 1, 1, 1, 1, 1, 1]]}')
    with OffloadedModel(folder, policy(), expert_bytes=1 << 20) as model:
        assert not model.experts._counts


def test_a_model_without_experts(saved):
    folder, _ = saved("llama")
    with pytest.raises(CommandError, match="without experts"):
        OffloadedModel(folder, policy(), expert_bytes=1 << 20)


def test_mixed_tiers(mixture, prompts, plain):
    """Layers that stay in memory keep their experts whole."""
    folder, model = mixture("qwen3_moe")
    rows, size = prompts(6), expert_buffer(folder)
    mixed = OffloadPolicy(3, 2, Shares(gpu=0.25, host=0.25, disk=0.5), HOST, GPU)
    done = generate(folder, rows, mixed, max_new_tokens=10, expert_bytes=4 * size)
    assert done.tokens == eager(model, plain, rows, 3, 10)


def test_in_half_precision_per_expert_tensors_become_one_matrix(mixture, prompts, plain):
    folder, model = mixture("mixtral", hidden_size=128)
    half = copy.deepcopy(model).to(torch.bfloat16)
    half.save_pretrained(folder)
    rows = prompts(3)
    done = generate(folder, rows, policy(), max_new_tokens=8, expert_bytes=6 * expert_buffer(folder))
    assert done.tokens == eager(half, plain, rows, 3, 8)


def test_likely_experts_of_the_next_layer_are_read_ahead(mixture, prompts, plain):
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


def test_guesses_that_were_wrong_are_withdrawn(mixture, prompts, plain, monkeypatch):
    """The next layer's router is asked early, and names the wrong ones: only time is lost."""
    folder, model = mixture("mixtral")
    rows, size = prompts(4), expert_buffer(folder)
    likely, wrong = ExpertCache._likely, {}

    def others(cache, place, hidden_states):
        named = {number for _, number in likely(cache, place, hidden_states)}
        wrong[place] = [number for number in range(8) if number not in named]
        return ((place, number) for number in wrong[place])

    monkeypatch.setattr(ExpertCache, "_likely", others)
    for slots in (2, 3, 12):
        done = generate(folder, rows, policy(1, 2), max_new_tokens=10, expert_bytes=slots * size)
        assert done.tokens == eager(model, plain, rows, 1, 10)
    assert any(wrong.values())


def test_an_expert_that_cannot_be_read_is_reported(mixture, prompts):
    folder, _ = mixture("gpt_oss")
    size = expert_buffer(folder)
    with OffloadedModel(folder, policy(), expert_bytes=4 * size) as model:
        file = folder / "model.safetensors"
        os.truncate(file, file.stat().st_size // 3)
        with pytest.raises(WeightsError, match="it was changed while it was in use"):
            model.generate(prompts(3), max_new_tokens=4)
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith(("nearflash-experts", "nearflash-read", "batch"))]


@pytest.mark.parametrize("version", [2, 1])
def test_a_damaged_expert_of_a_fused_parameter_is_reported(tmp_path, version):
    """Only the whole parameter had a checksum: damage passed, and another expert's bytes."""
    values = torch.randn(8, 64, 64)
    data = values.numpy().view(np.uint8).reshape(-1)
    write_file(tmp_path / "file", {"e": ("F32", (8, 64, 64))}, [PackedTensor("e", "F32", (8, 64, 64), "dense", data)])
    tensor = read_file(tmp_path / "file")["e"]
    assert len(tensor.row_checksums) == 8
    tensor = tensor if version == 2 else replace(tensor, row_checksums=())
    source = _with_row_checksums(Source("e", tensor.shape, torch.float32, (Piece(tensor),)))
    rot(tmp_path / "file", data[-tensor.stored_bytes // 8 :].tobytes(), tensor.offset + 3 * tensor.stored_bytes // 8)
    reader, memory = LayoutReader(), host_memory(1 << 16)
    for expert in range(8):
        layout = Layout({"e": _of_expert(source, expert)}, gap_bytes=0)
        if expert != 3:
            reader.read_runs(layout, memory)
            assert torch.equal(layout.views(memory)["e"], values[expert])
            continue
        with pytest.raises(WeightsError, match=r"tensor 'e', .* it is damaged: its checksum is another"):
            reader.read_runs(layout, memory)
    reader.close()
    if version == 1:
        with pytest.raises(WeightsError, match=r"tensor 'e', .* it is damaged: its checksum is another"):
            _with_row_checksums(Source("e", tensor.shape, torch.float32, (Piece(tensor),)))


def test_counts_are_not_written_through_a_link(mixture, prompts, tmp_path):
    folder, _ = mixture("mixtral")
    (tmp_path / "other").write_text("mine")
    for name in (COUNTS_FILE, f"{COUNTS_FILE}.{os.getpid()}"):
        (folder / name).symlink_to(tmp_path / "other")
    (folder / COUNTS_FILE).unlink()
    generate(folder, prompts(2), policy(), max_new_tokens=2, expert_bytes=1 << 20)
    assert (tmp_path / "other").read_text() == "mine" and not (folder / COUNTS_FILE).is_symlink()
    assert (folder / COUNTS_FILE).stat().st_mode & 0o777 == 0o600


def test_parameters_are_put_back(mixture, prompts):
    folder, _ = mixture("qwen3_moe")
    model = OffloadedModel(folder, policy(), expert_bytes=1 << 20)
    module = model.skeleton.layers[0].mlp.experts
    assert "gate_up_proj" not in module._parameters and not isinstance(module.gate_up_proj, torch.Tensor)
    model.close()
    model.close()
    assert isinstance(module.gate_up_proj, torch.nn.Parameter) and module.gate_up_proj.is_meta
    assert "forward" not in vars(module)
    assert not any(model.ledger.held[tier] for tier in ("host", "disk") if tier in model.ledger.held)


def test_routers_stay_in_memory(mixture):
    folder, plain_model = mixture("mixtral")
    with OffloadedModel(folder, policy(), expert_bytes=1 << 20) as model:
        for number, layer in enumerate(model.skeleton.layers):
            weight = layer.mlp.gate.weight
            assert torch.equal(weight, plain_model.model.layers[number].mlp.gate.weight)
            assert layer.self_attn.q_proj.weight.is_meta


def test_a_folder_that_cannot_be_written_to_keeps_no_counts(mixture, prompts, monkeypatch):
    folder, _ = mixture("mixtral")
    original = os.open

    def refused(path, flags, *args, **kwargs):
        if flags & os.O_CREAT and str(path).startswith(str(folder)):
            raise PermissionError(13, "Permission denied")
        return original(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refused)
    generate(folder, prompts(2), policy(), max_new_tokens=2, expert_bytes=1 << 20)
    assert not (folder / COUNTS_FILE).exists()
