"""Seconds of the runtime beside computing, by layer, pass and batch: decoders of tiny layers, all of them on disk.

Threads are woken, buffers handed over, parameters bound; where processors compute, none of it is hidden.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nearflash.inference.policy.policy import AttentionMode, AttentionPolicy
from nearflash.offload.generation import OffloadedModel
from nearflash.planning.policy import OffloadPolicy, Shares
from nearflash.weights.pretrained import silent_transformers

__all__ = ["VisitSeconds", "tiny_decoder", "visit_seconds"]

_FEW, _MANY = 2, 10
"""Layers of which the difference is taken."""
_SEQUENCES, _BATCHES, _PROMPT_TOKENS, _STEPS = 4, 4, 4, 16
_REPEATS = 3
_CHOOSING = AttentionPolicy(AttentionMode.SPARF_PAGE, top_k=1, local_window=1)
_CHOSEN_TOKENS = 132
"""Of prompts that have several KV page groups to choose among."""


def tiny_decoder(layers: int) -> LlamaConfig:
    """A decoder whose matrices take no time."""
    return LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
                       num_key_value_heads=2, vocab_size=16, eos_token_id=None)  # fmt: skip


@dataclass(frozen=True)
class VisitSeconds:
    """Seconds for each layer and batch, what the layer itself takes included; for each batch and pass beside its
    layers; once for each batch before its first pass; and for each layer and sequence that an engine attends to, more
    than where keys and values are computed with as they come from the disk.
    """

    layer: float
    one_pass: float
    start: float
    engine: float

    @classmethod
    def of(
        cls, few: Sequence[tuple[float, float]], many: Sequence[tuple[float, float]],
        by_engine: Sequence[tuple[float, float]],
    ) -> "VisitSeconds":  # fmt: skip
        """Seconds from those of a step of decode and of prefill, in runs with few and with many layers, and of many
        that engines attend to."""
        least = [[min(values) for values in zip(*runs, strict=True)] for runs in (few, many, by_engine)]
        (few_step, few_prefill), (many_step, _), (engine_step, _) = least
        layer = max(0.0, many_step - few_step) / ((_MANY - _FEW) * _BATCHES)
        one_pass = max(0.0, few_step / _BATCHES - _FEW * layer)
        engine = max(0.0, engine_step - many_step) / (_MANY * _BATCHES * _SEQUENCES)
        return cls(layer, one_pass, max(0.0, few_prefill - few_step) / _BATCHES, engine)


def visit_seconds(device: torch.device, dtype: torch.dtype, folder: Path) -> VisitSeconds:
    """Seconds of the runtime for each layer, pass and batch. Raises what the disk raises.

    Runs with few and with many layers take turns: a machine that becomes slower does so for both.
    """
    with ExitStack() as stack:
        few, many = (stack.enter_context(_open_decoder(layers, device, dtype, folder)) for layers in (_FEW, _MANY))
        cases: list[tuple[OffloadedModel, AttentionPolicy | None]] = [(few, None), (many, None), (many, _CHOOSING)]
        turns = [[_seconds(model, attention) for model, attention in cases] for _ in range(_REPEATS)]
    return VisitSeconds.of(*zip(*turns, strict=True))


@contextmanager
def _open_decoder(layers: int, device: torch.device, dtype: torch.dtype, folder: Path) -> Iterator[OffloadedModel]:
    """A decoder of tiny layers, all of them on the disk of a folder."""
    policy = OffloadPolicy(_SEQUENCES, _BATCHES, Shares(disk=1), Shares(disk=1), Shares(gpu=1))
    with tempfile.TemporaryDirectory(prefix=".nearflash-measure-", dir=folder) as model:
        with silent_transformers():
            LlamaForCausalLM(tiny_decoder(layers)).to(dtype).save_pretrained(model)
        with OffloadedModel(model, policy, device=device.type, scratch=folder) as opened:
            yield opened


def _seconds(model: OffloadedModel, attention: AttentionPolicy | None) -> tuple[float, float]:
    """Seconds of a step of decode and of prefill; attention: by an engine, of longer prompts."""
    tokens = _PROMPT_TOKENS if attention is None else _CHOSEN_TOKENS
    rows = [[1] * tokens for _ in range(model.policy.block_size)]
    report = model.generate(rows, max_new_tokens=_STEPS, stop_tokens=[], attention=attention).report
    return report.decode_s / (_STEPS - 1), report.prefill_s
