"""Folders without the files of a tokenizer."""

import pytest
import transformers

from nearflash.abi.errors import CommandError
from nearflash.weights.folder import has_tokenizer
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
