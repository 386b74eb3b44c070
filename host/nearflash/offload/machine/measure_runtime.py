"""Seconds of the runtime for each layer and batch beside computing it: decoders of tiny layers, all of them on disk.

Threads are woken, buffers handed over, parameters bound; where processors compute, none of it is hidden.
"""

import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nearflash.offload.generation import OffloadedModel
from nearflash.planning.policy import OffloadPolicy, Shares
from nearflash.weights.pretrained import silent_transformers

__all__ = ["tiny_decoder", "visit_seconds"]

_FEW, _MANY = 2, 10
"""Layers of which the difference is taken."""
_SEQUENCES, _BATCHES, _PROMPT_TOKENS, _STEPS = 4, 4, 4, 16
_REPEATS = 3


def tiny_decoder(layers: int) -> LlamaConfig:
    """A decoder whose matrices take no time."""
    return LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
                       num_key_value_heads=2, vocab_size=16, eos_token_id=None)  # fmt: skip


def visit_seconds(device: torch.device, dtype: torch.dtype, folder: Path) -> float:
    """Seconds of decode for each layer and batch, what the layer itself takes included. Raises what the disk raises."""
    few, many = (min(_step_seconds(layers, device, dtype, folder)) for layers in (_FEW, _MANY))
    return max(0.0, many - few) / ((_MANY - _FEW) * _BATCHES)


def _step_seconds(layers: int, device: torch.device, dtype: torch.dtype, folder: Path) -> list[float]:
    policy = OffloadPolicy(_SEQUENCES, _BATCHES, Shares(disk=1), Shares(disk=1), Shares(gpu=1))
    rows = [[1] * _PROMPT_TOKENS for _ in range(policy.block_size)]
    with tempfile.TemporaryDirectory(prefix=".nearflash-measure-", dir=folder) as model:
        with silent_transformers():
            LlamaForCausalLM(tiny_decoder(layers)).to(dtype).save_pretrained(model)
        with OffloadedModel(model, policy, device=device.type, scratch=folder) as opened:
            reports = [opened.generate(rows, max_new_tokens=_STEPS, stop_tokens=[]).report for _ in range(_REPEATS)]
    return [report.decode_s / (_STEPS - 1) for report in reports]
