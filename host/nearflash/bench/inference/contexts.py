"""Contexts that the steps of bench `generate` decode after: random numbers, or K and V of English text.

Text is that of the reference manual that comes with Python (pydoc_data.topics), in pieces of TEXT_TOKENS tokens, as
many as the model has positions for; a context of more is K and V of several pieces one after the other, each sequence's
own piece last, whose next tokens the steps take.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedConfig

from nearflash.bench.inference.texts import manual_pieces
from nearflash.inference.cache.attention import attach
from nearflash.inference.cache.decoder import check_all_layers
from nearflash.inference.models import kv_shape, model_positions
from nearflash.storage.kv import KvShape

__all__ = ["TEXT_TOKENS", "Contexts", "default_config", "random_contexts", "random_model", "text_contexts"]

F16 = NDArray[np.float16]
TEXT_TOKENS = 8000


@dataclass(frozen=True)
class Contexts:
    """Sequences, and the tokens that are decoded after them."""

    model: Any
    shape: KvShape
    tokens: int
    """Of the context of each sequence."""
    ids: Tensor
    """Of the steps, (sequences, steps)."""
    place: int
    """Position of the first of them."""
    kv: Callable[[int], Iterator[tuple[F16, F16]]]
    """K and V (heads, tokens, d) of each sequence, of a layer."""
    about: dict[str, str]
    """What they are, for rows."""

    @property
    def batch(self) -> int:
        """Sequences."""
        return len(self.ids)

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        heads: int = self.model.config.get_text_config(decoder=True).num_attention_heads
        return heads // self.shape.kv_heads


def default_config(layers: int = 30) -> PreTrainedConfig:
    """The configuration of a model of 9 query and 3 KV heads of 64, with 30 layers of 135 M parameters."""
    return LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152, tie_word_embeddings=True, max_position_embeddings=1 << 16,
    )  # fmt: skip


def random_model(config: PreTrainedConfig) -> Any:
    """A model of random weights, in bf16. Raises UnsupportedError for one that is not all full attention."""
    check_all_layers(config)
    torch.manual_seed(0)
    return attach(AutoModelForCausalLM.from_config(config).eval().bfloat16())


def random_contexts(model: Any, tokens: int, batch: int, steps: int) -> Contexts:
    """K and V are normal numbers, some dims of K four times as large; the tokens of the steps are all alike."""
    shape = kv_shape(model)

    def kv(layer: int) -> Iterator[tuple[F16, F16]]:
        rng = np.random.default_rng(layer)
        k, v = (rng.standard_normal((shape.kv_heads, tokens, shape.dim), np.float32) for _ in range(2))
        k[..., rng.choice(shape.dim, shape.dim // 8, replace=False)] *= 4
        for sequence in range(batch):
            turned = (np.roll(x.astype(np.float16), 31 * sequence, axis=1) for x in (k, v))
            yield next(turned), next(turned)

    about = {"model": f"{_sizes(model)}, random weights, bf16, one thread", "kv": "random numbers"}
    return Contexts(model, shape, tokens, torch.ones(batch, steps, dtype=torch.int64), tokens, kv, about)


def text_contexts(model: Any, tokenizer: Any, batch: int, steps: int, tokens: int = TEXT_TOKENS) -> Contexts:
    """`batch` texts of `tokens` tokens, or of the model's positions; each sequence's context is all, its own last.

    The model (fp32, attached) computes K and V, and is bf16 from then on. Raises CommandError for too little text,
    UnsupportedError for a model that is not all full attention.
    """
    check_all_layers(model.config)
    tokens = min(tokens, model_positions(model.config) - steps)
    rows = manual_pieces(tokenizer, batch, tokens + steps)
    texts = []
    for number, row in enumerate(rows):
        print(f"K and V of text {number + 1} of {batch}, {tokens} tokens", file=sys.stderr, flush=True)
        texts.append(_prefill(model, row[:tokens]))

    def kv(layer: int) -> Iterator[tuple[F16, F16]]:
        for sequence in range(batch):
            parts = [texts[(sequence + 1 + step) % batch][layer] for step in range(batch)]
            k, v = (np.concatenate([text[part] for text in parts], axis=1) for part in range(2))
            yield k, v

    about = {
        "model": f"{_sizes(model)}, bf16, one thread",
        "kv": f"of {batch} texts of {tokens} tokens (pydoc_data.topics)",
    }
    return Contexts(model.bfloat16(), kv_shape(model), batch * tokens, rows[:, tokens:], tokens, kv, about)


def _sizes(model: Any) -> str:
    """Describe a model's sizes."""
    config, shape = model.config.get_text_config(decoder=True), kv_shape(model)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    return (
        f"{config.model_type}, {millions:.0f} M parameters: {shape.layers} layers, {config.num_attention_heads} query "
        f"and {shape.kv_heads} KV heads of {shape.dim}"
    )


def _prefill(model: Any, ids: Tensor) -> list[tuple[F16, F16]]:
    """K and V (heads, tokens, d) of each layer."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[None], past_key_values=cache, logits_to_keep=1)
    return [(layer.keys[0].half().numpy(), layer.values[0].half().numpy()) for layer in cache.layers]
