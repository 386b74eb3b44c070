"""A mixture of experts larger than its memory: experts read as they are routed, all of them, and accelerate's offload.

The model has random weights, made here, in Mixtral's layout with 32 experts, 2 a token; a quarter of its bytes may hold
experts. Random routers choose evenly: the hit rate is about the memory's share, and real ones do better.
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import MixtralConfig

from nearflash.bench.offload.runtime import run
from nearflash.planning.policy import OffloadPolicy, Shares

__all__ = ["measure", "write_mixture"]

_SIZES = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 10, "num_attention_heads": 16,
          "num_key_value_heads": 4, "head_dim": 64, "num_local_experts": 32, "vocab_size": 8192}  # fmt: skip
"""4.1 GB in bf16."""
_BATCH, _PROMPT, _NEW = 4, 16, 8


def measure(path: Path, sizes: dict[str, int] | None = None) -> Iterator[dict[str, Any]]:
    """Rows of nearflash.bench.offload.runtime, of one batch of four prompts; files below `path` go at the end."""
    policy = OffloadPolicy(_BATCH, 1, Shares(disk=1), Shares(host=1), Shares(gpu=1), cpu_attention=True)
    with tempfile.TemporaryDirectory(prefix=".nearflash-mixture-", dir=path) as folder:
        total = write_mixture(Path(folder), sizes or _SIZES)
        for row in run(
            Path(folder), path, _BATCH, _PROMPT, _NEW, (_BATCH,), policy=policy, expert_bytes=total // 4
        ):  # fmt: skip
            yield {**row, "model_bytes": total, "expert_memory_bytes": total // 4}


def write_mixture(folder: Path, sizes: dict[str, int]) -> int:
    """A checkpoint of random weights, one file a layer, and its configuration; returns its bytes."""
    config = MixtralConfig(
        **sizes, num_experts_per_tok=2, max_position_embeddings=2048, pad_token_id=0, eos_token_id=2, bos_token_id=1,
        tie_word_embeddings=False, sliding_window=None, dtype="bfloat16", architectures=["MixtralForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    random = torch.Generator().manual_seed(1)
    places: dict[str, str] = {}
    total = 0
    for number in range(config.num_hidden_layers):
        tensors = dict(_layer(config, number, random))
        if number == 0:
            tensors["model.embed_tokens.weight"] = _normal(random, config.vocab_size, config.hidden_size)
        if number == config.num_hidden_layers - 1:
            head = _normal(random, config.vocab_size, config.hidden_size)
            tensors["lm_head.weight"] = head * config.hidden_size**-0.5
            tensors["model.norm.weight"] = torch.ones(config.hidden_size, dtype=torch.bfloat16)
        file = f"model-{number + 1:05d}-of-{config.num_hidden_layers:05d}.safetensors"
        save_file(tensors, folder / file, {"format": "pt"})
        places.update(dict.fromkeys(tensors, file))
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return total


def _layer(config: Any, number: int, random: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    prefix, hidden, inner = f"model.layers.{number}.", config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    for name, shape in (
        ("q", (queries, hidden)),
        ("k", (keys, hidden)),
        ("v", (keys, hidden)),
        ("o", (hidden, queries)),
    ):
        yield f"{prefix}self_attn.{name}_proj.weight", _normal(random, *shape) * shape[1] ** -0.5
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{prefix}{name}.weight", torch.ones(hidden, dtype=torch.bfloat16)
    yield f"{prefix}block_sparse_moe.gate.weight", _normal(random, config.num_local_experts, hidden) * 0.3
    for expert in range(config.num_local_experts):
        for name, shape in (("w1", (inner, hidden)), ("w3", (inner, hidden)), ("w2", (hidden, inner))):
            leaf = f"{prefix}block_sparse_moe.experts.{expert}.{name}.weight"
            yield leaf, _normal(random, *shape) * shape[1] ** -0.5


def _normal(random: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=random, dtype=torch.float32).to(torch.bfloat16)
