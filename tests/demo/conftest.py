"""A random Llama of 20 thousand parameters with a tokenizer, as a transformers folder."""

import pytest
import torch


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("llama")
    alphabet = {character: index for index, character in enumerate("abcdefgh ")}
    characters = Tokenizer(models.WordLevel(alphabet, unk_token=" "))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=characters).save_pretrained(folder)
    torch.manual_seed(4)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": len(alphabet)}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True)).save_pretrained(folder)
    return folder


@pytest.fixture
def arguments(tiny_llama, tmp_path):
    """Options of a demo that takes seconds, on devices that need no build."""
    (tmp_path / "text.txt").write_text("abcdefgh fedcba " * 40)
    options = {
        "--model": tiny_llama, "--text": tmp_path / "text.txt", "--output": tmp_path / "out",
        "--rtl-device": "model:update-tiny", "--rtl-steps": 3, "--host-device": "host:update-tiny", "--host-steps": 3,
        "--window": 32, "--batch": 2, "--lr": 1e-2,
    }  # fmt: skip
    return [str(word) for pair in options.items() for word in pair]
