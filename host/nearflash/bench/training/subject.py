"""The model and the batches that every case of the bench trains on."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

__all__ = ["SCALARS", "SIZES", "TOKENS", "batch", "model"]

SIZES = {
    "smollm2-135m": {"vocab_size": 49152, "num_hidden_layers": 30},
    "tiny": {"vocab_size": 2048, "num_hidden_layers": 4},
}
"""Shapes: SmolLM2-135M's, and one for a first look. Weights are random: nothing that is timed depends on them."""
TOKENS = 64
"""Of the one sequence in a batch: few, since the processor's backward is not what is compared."""
SCALARS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def model(size: str) -> Any:
    """A Llama with tied embeddings, in bf16, as every case begins with it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
        use_cache=False, **SIZES[size],
    )  # fmt: skip
    return LlamaForCausalLM(config).bfloat16().train()


def batch(size: str, step: int) -> torch.Tensor:
    """Token ids (1, TOKENS) of a step."""
    return torch.randint(0, SIZES[size]["vocab_size"], (1, TOKENS), generator=torch.Generator().manual_seed(step))
