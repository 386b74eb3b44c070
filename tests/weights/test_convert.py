import json
import os
import stat

import numpy as np
import pytest

pytest.importorskip("accelerate")

import torch
import transformers
from safetensors.torch import load_file

from nearflash.abi.errors import NonFiniteError, StateError, StorageFullError, WeightsError
from nearflash.weights import convert, expand, open_checkpoint
from nearflash.weights.convert import copy_others, layer_weights, write_model

SIZES = dict(vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2)
OPTIONS = dict(format="coded-bitmap", bits=16, dtype=torch.float16)


@pytest.fixture
def model():
    torch.manual_seed(3)
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)).eval()
    for name in layer_weights(made):
        weight = made.get_parameter(name).data
        weight[weight.abs() < weight.abs().median()] = 0
    return made


def test_layer_weights_are_those_of_the_decoder_layers(model):
    names = layer_weights(model)
    assert len(names) == 14 and names[0] == "model.layers.0.self_attn.q_proj.weight"
    assert not any("lm_head" in name or "embed" in name or "norm" in name for name in names)
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2))
    assert [name.partition("h.0.")[2] for name in layer_weights(gpt2)] == [
        "attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_tensor_is_there_to_the_bit(model, tmp_path, dtype):
    seen = []
    options = OPTIONS | {"dtype": dtype}
    size = write_model(model, tmp_path, compressed=layer_weights(model), written=seen.append, **options)
    assert size == (tmp_path / "model.safetensors").stat().st_size
    found, state = open_checkpoint(tmp_path), model.state_dict()
    assert found.keys() == state.keys() - {"lm_head.weight"}  # which is tied to the embedding
    assert {each.name for each in seen} == found.keys()
    for each in seen:
        tensor, expected = found[each.name], state[each.name].to(dtype)
        assert tensor.form == each.form == ("bitmap" if each.name in layer_weights(model) else "dense")
        assert each.elements == expected.numel() and each.values == torch.count_nonzero(expected)
        assert each.dense_bytes == expected.nbytes and each.stored_bytes == tensor.stored_bytes
        values = torch.from_numpy(np.ascontiguousarray(expand(tensor))).view(dtype)
        assert torch.equal(values, expected)


def test_other_programs_read_what_is_not_compressed(model, tmp_path):
    write_model(model, tmp_path, compressed=layer_weights(model), metadata={"made_by": "a test"}, **OPTIONS)
    found = load_file(tmp_path / "model.safetensors")
    embedding = model.state_dict()["model.embed_tokens.weight"].half()
    assert torch.equal(found["model.embed_tokens.weight"], embedding)
    assert found["model.layers.0.mlp.up_proj.weight"].dtype == torch.uint8


def test_several_files_have_an_index(model, tmp_path, monkeypatch):
    one, many = tmp_path / "one", tmp_path / "many"
    write_model(model, one, compressed=layer_weights(model), **OPTIONS)
    monkeypatch.setattr(convert, "SHARD_BYTES", 40_000)
    size = write_model(model, many, compressed=layer_weights(model), **OPTIONS)
    files = sorted(many.glob("*.safetensors"))
    assert len(files) > 2 and files[-1].name == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    assert size == sum(file.stat().st_size for file in files)
    index = json.loads((many / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == size
    expected, found = open_checkpoint(one), open_checkpoint(many)
    assert expected.keys() == found.keys()
    assert all(np.array_equal(expand(expected[name]), expand(found[name])) for name in found)


def test_a_folder_with_files_stays_as_it_is(model, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(StateError, match="must be a new or an empty folder"):
        write_model(model, tmp_path, compressed=(), **OPTIONS)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("existed", [True, False])
def test_nothing_is_left_after_an_error(model, tmp_path, existed, monkeypatch):
    monkeypatch.setattr(convert, "SHARD_BYTES", 40_000)
    model.model.layers[1].mlp.down_proj.weight.data[5, 5] = 1e6  # no fp16
    folder = tmp_path / "new"
    if existed:
        folder.mkdir()
    with pytest.raises(NonFiniteError, match=r"tensor 'model.layers.1.mlp.down_proj.weight' must be finite in .*16"):
        write_model(model, folder, compressed=layer_weights(model), **OPTIONS)
    assert folder.exists() == existed and not (existed and list(folder.iterdir()))
    write_model(model, folder, compressed=layer_weights(model), **OPTIONS | {"dtype": torch.bfloat16})


def test_a_full_disk_leaves_nothing(model, tmp_path, monkeypatch):
    def full(*_):
        raise StorageFullError("no space left")

    monkeypatch.setattr(convert, "write_file", full)
    with pytest.raises(StorageFullError):
        write_model(model, tmp_path / "new", compressed=layer_weights(model), **OPTIONS)
    assert not (tmp_path / "new").exists()


def test_what_lies_beside_the_weights_is_copied(model, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir(), target.mkdir()
    for name in ("config.json", "tokenizer.json", "LICENSE", "model-1.safetensors", "pytorch_model.bin", "x.gguf",
                 "compression.json"):  # fmt: skip
        (source / name).write_text(name)
    (source / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    copy_others(model, None, source, target)
    assert sorted(path.name for path in target.iterdir()) == ["LICENSE", "config.json", "tokenizer.json"]
    assert (target / "LICENSE").read_text() == "LICENSE"


def test_a_copied_file_is_the_users_alone(model, tmp_path):
    """A private file behind a link was readable by all in the new folder."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir(), target.mkdir()
    (tmp_path / "private").write_text("mine")
    (tmp_path / "private").chmod(0o600)
    (source / "notes.txt").symlink_to(tmp_path / "private")
    (source / "config.json").write_text("{}")
    os.mkfifo(source / "pipe")
    copy_others(model, None, source, target)
    assert {path.name: path.lstat().st_mode for path in target.iterdir()} == {
        "notes.txt": stat.S_IFREG | 0o600, "config.json": stat.S_IFREG | 0o600
    }  # fmt: skip
    assert (target / "notes.txt").read_text() == "mine"


def test_files_of_two_runs_are_of_two_checkpoints(model, tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "SHARD_BYTES", 40_000)
    for name in ("one", "two"):
        write_model(model, tmp_path / name, compressed=layer_weights(model), **OPTIONS)
    first = next((tmp_path / "two").glob("model-00001*"))
    first.replace(tmp_path / "one" / first.name)
    with pytest.raises(WeightsError, match="must be of the checkpoint"):
        open_checkpoint(tmp_path / "one")
