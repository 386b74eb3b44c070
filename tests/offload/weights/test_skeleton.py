"""Where a model's parameters come from: renamed, fused, tied, missing."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from nearflash.abi.errors import CommandError, UnsupportedError, WeightsError
from nearflash.offload.weights.skeleton import open_skeleton
from nearflash.weights.checkpoint import open_checkpoint
from nearflash.weights.layers import decoder_layers
from nearflash.weights.sources import sources_of

FAMILIES = ["llama", "qwen2", "gemma2", "opt", "mixtral", "qwen3_moe", "gpt_oss"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_is_read_as_transformers_has_it(saved, family):
    folder, model = saved(family)
    skeleton = open_skeleton(folder)
    assert all(parameter.is_meta for parameter in skeleton.model.parameters())
    found = {}
    prefixes = {id(module): name for name, module in skeleton.model.named_modules()}
    for layer, sources in zip(skeleton.layers, skeleton.layer_sources, strict=True):
        found.update({f"{prefixes[id(layer)]}.{name}": source for name, source in sources.items()})
    assert len(found) == sum(map(len, skeleton.layer_sources))
    found.update(skeleton.other_sources)
    expected = model.state_dict()
    for name, source in found.items():
        value = torch.full(source.shape, torch.nan, dtype=source.dtype)
        source.read_into(value)
        assert torch.equal(value, expected[name]), name
        assert source.stored_bytes == source.size_bytes == value.numel() * 4
    missing = expected.keys() - found.keys()
    assert missing == ({"lm_head.weight"} if model.config.tie_word_embeddings else set())


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_fused_experts_come_from_tensors_of_single_ones(saved, family):
    folder, _ = saved(family)
    assert any(".experts.3." in name for name in open_checkpoint(folder)), "as published checkpoints have them"
    fused = [s for n, s in open_skeleton(folder).layer_sources[1].items() if n.endswith("experts.gate_up_proj")]
    assert len(fused) == 1 and fused[0].experts == 8 and len(fused[0].pieces) == 16
    assert fused[0].keep().experts == 8


def test_kept_sources_need_no_file(saved, tmp_path):
    _, model = saved("mixtral")
    model.save_pretrained(tmp_path)
    skeleton = open_skeleton(tmp_path)
    kept = {name: source.keep() for name, source in skeleton.layer_sources[2].items()}
    (tmp_path / "model.safetensors").unlink()
    for name, source in kept.items():
        value = torch.empty(source.shape)
        source.read_into(value)
        assert torch.equal(value, model.model.layers[2].state_dict()[name])


def changed(saved, tmp_path, change, family="llama"):
    _, model = saved(family)
    model.save_pretrained(tmp_path)
    values = load_file(tmp_path / "model.safetensors")
    change(values)
    save_file(values, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path


def test_a_missing_tensor(saved, tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    folder = changed(saved, tmp_path, lambda values: values.pop(name))
    with pytest.raises(WeightsError, match=r"layers\.1\.mlp\.up_proj\.weight' must be in the checkpoint"):
        open_skeleton(folder)


def test_a_tensor_of_another_shape(saved, tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    folder = changed(saved, tmp_path, lambda values: values.update({name: torch.zeros(3, 4)}))
    with pytest.raises(WeightsError, match=r"its shape must be \(96, 64\), as the model's, not \(3, 4\)"):
        open_skeleton(folder)


def test_a_missing_expert(saved, tmp_path):
    def change(values):
        del values[next(name for name in values if "layers.1" in name and ".experts.5." in name)]

    with pytest.raises(WeightsError, match="must be one of 8 tensors"):
        open_skeleton(changed(saved, tmp_path, change, "mixtral"))


def test_tensors_that_the_model_does_not_have_are_refused_unless_it_states_to_ignore_them(saved, tmp_path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    folder = changed(saved, tmp_path, lambda values: values.update({name: torch.zeros(5)}))
    assert name not in open_skeleton(folder).other_sources
    folder = changed(saved, tmp_path, lambda values: values.update(extra=torch.zeros(5)))
    with pytest.raises(WeightsError, match=r"tensor 'extra', .* must be one of LlamaForCausalLM's"):
        open_skeleton(folder)


def test_several_shards(saved, tmp_path):
    _, model = saved("llama")
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    skeleton = open_skeleton(tmp_path)
    files = {piece.tensor.path for layer in skeleton.layer_sources for s in layer.values() for piece in s.pieces}
    assert len(files) > 1
    assert set(sources_of(skeleton.model, open_checkpoint(tmp_path))) == set(model.state_dict())


def test_the_dtype_is_the_checkpoints_unless_it_is_given(saved, tmp_path):
    def change(values):
        values.update({name: value.half() for name, value in values.items()})

    folder = changed(saved, tmp_path, change)
    assert open_skeleton(folder).model.dtype is torch.float16
    assert open_skeleton(folder, torch.float32).model.dtype is torch.float32
    source = open_skeleton(folder, torch.float32).layer_sources[0]["mlp.up_proj.weight"]
    assert source.dtype is torch.float32 and source.stored_bytes * 2 == source.size_bytes


def test_folders_that_are_no_model(tmp_path, saved):
    with pytest.raises(CommandError, match=r"config\.json"):
        open_skeleton(tmp_path / "none")
    folder, _ = saved("llama")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(WeightsError, match="must be a safetensors file or a folder"):
        open_skeleton(tmp_path)


def test_a_model_without_a_list_of_layers(saved):
    other = copy.deepcopy(saved("llama")[1])
    assert len(decoder_layers(other)[1]) == 4 and decoder_layers(other)[0] == "model.layers"
    other.config.num_hidden_layers = 9
    with pytest.raises(UnsupportedError, match="must have a list of 9 layers"):
        decoder_layers(other)


def test_a_generation_config_is_used(saved, tmp_path):
    _, model = saved("llama")
    model.save_pretrained(tmp_path)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [7, 9]}))
    assert open_skeleton(tmp_path).model.generation_config.eos_token_id == [7, 9]
