"""A model of two layers, its attention to be replaced."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nearflash.bench.inference.window import NAME


@pytest.fixture(scope="module")
def tiny_model():
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, attn_implementation=NAME,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()
