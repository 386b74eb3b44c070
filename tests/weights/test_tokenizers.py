"""Folders without the files of a tokenizer."""

import pytest
import transformers

from nearflash.abi.errors import CommandError
from nearflash.weights.folder import has_tokenizer, open_folder
from nearflash.weights.pretrained import load_tokenizer


@pytest.mark.parametrize("configured", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_a_folder_without_a_tokenizer_is_named(tmp_path, family, configured):
    """transformers named sentencepiece for Llama, and made a tokenizer without tokens for GPT-NeoX: empty prompts."""
    transformers.AutoConfig.for_model(family).save_pretrained(tmp_path)
    if configured:
        (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(
        CommandError, match=f"{tmp_path} has no tokenizer, .*: copy tokenizer_config.json and tokenizer"
    ):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "spiece.model", "vocab.json", "qwen.tiktoken"])
def test_files_of_tokens(tmp_path, name):
    assert not has_tokenizer(tmp_path)
    (tmp_path / name).touch()
    assert has_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["ByT5Tokenizer", "CanineTokenizer"])
def test_tokenizers_of_bytes_and_characters_have_no_vocabulary(tmp_path, name):
    transformers.GPT2Config(n_layer=1).save_pretrained(tmp_path)
    getattr(transformers, name)().save_pretrained(tmp_path)
    assert not (tmp_path / "tokenizer.json").exists()
    text = "Flash, 4 KiB"
    tokenizer = load_tokenizer(tmp_path)
    tokens = tokenizer(text)["input_ids"]
    assert type(tokenizer).__name__ == name and tokenizer.decode(tokens, skip_special_tokens=True) == text


def test_a_tokenizers_damaged_configuration_is_named(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(CommandError, match=r"tokenizer_config\.json must be a readable JSON file"):
        has_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["", "model-Q4.gguf"])
def test_weights_in_a_gguf_file_have_a_remedy(tmp_path, name):
    (tmp_path / "model-Q4.gguf").write_bytes(b"GGUF")
    with pytest.raises(CommandError, match="of GGUF files only its own is read; take the checkpoint of safetensors"):
        open_folder(tmp_path / name)
