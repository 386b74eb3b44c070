"""A language model of two layers and batches for it."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_model():
    def make(dtype=torch.float32):
        torch.manual_seed(3)
        config = LlamaConfig(
            vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, tie_word_embeddings=True, use_cache=False,
        )  # fmt: skip
        return LlamaForCausalLM(config).to(dtype)

    return make


@pytest.fixture
def rows():
    """64 sequences of 16 tokens, as a Trainer takes them."""
    ids = torch.randint(0, 97, (64, 16), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": row, "labels": row} for row in ids]


@pytest.fixture
def values():
    """Copies of a model's parameters."""
    return lambda model: [p.detach().clone() for p in model.parameters()]
