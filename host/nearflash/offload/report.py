"""Reports of a generation: how far it is, and at its end the texts and their cost."""

from dataclasses import dataclass

__all__ = ["OffloadProgress", "OffloadReport", "OffloadResult"]


@dataclass(frozen=True)
class OffloadProgress:
    """How far a generation is."""

    finished: int
    """Prompts, those of earlier runs included."""
    prompts: int
    step: int
    """Tokens of each prompt of the block that is computed."""
    steps: int
    """Of these at most."""
    tokens_per_s: float
    """Of all prompts computed in this run, since its start."""
    remaining_s: float
    """Until all are finished, at the rate of this run so far, if no text ends early."""


@dataclass(frozen=True)
class OffloadReport:
    """The cost of one call of `generate`."""

    new_tokens: int
    """Of all prompts, up to their stop tokens."""
    total_s: float
    """Everything but loading the model."""
    prefill_s: float
    """Of all blocks, until the first token of each prompt."""
    decode_s: float
    """Of all blocks, from then on."""
    seconds: dict[str, float]
    """By phase: compute, and what computing waited for."""
    link_bytes: dict[str, int]
    """By what and link: `weights disk to host`, `cache host to disk`, …"""
    peak_bytes: dict[str, int]
    """By tier: buffers of weights, KV cache and activations, at most at a time."""
    peak_process_bytes: int
    """Of the process's memory since its program began."""
    weights_s: float = 0.0
    """Of loading what stays in memory, before the first block."""
    expert_hits: int = 0
    """Routed experts, each once for a layer and batch, that were in memory."""
    experts_ahead: int = 0
    """That were read, or being read, because the router was asked with the hidden states of the layer before."""
    expert_misses: int = 0
    """That were neither."""

    @property
    def tokens_per_s(self) -> float:
        """New tokens by all of the time."""
        return self.new_tokens / max(self.total_s, 1e-9)

    @property
    def expert_hit_rate(self) -> float:
        """Routed experts that were in memory, of all that were asked for."""
        return self.expert_hits / max(self.expert_hits + self.experts_ahead + self.expert_misses, 1)


@dataclass(frozen=True)
class OffloadResult:
    """Continued prompts, in their order."""

    tokens: list[list[int]]
    """New ones, up to the stop token."""
    texts: list[str]
    """Empty where the model has no tokenizer."""
    report: OffloadReport
    resumed: int = 0
    """Prompts whose results an earlier run had written."""
