"""An offloading policy: the block of sequences, and which share of what lies on which tier.

Source: FlexGen (arXiv 2303.06865), section 4.2; the tier `device`, near-storage drives, is ours.
"""

import math
from dataclasses import dataclass

from nearflash.abi.errors import CommandError

__all__ = ["STAGED_TENSORS", "VISITS_AHEAD", "OffloadPolicy", "Shares", "attends_on_host", "prefill_tokens"]

VISITS_AHEAD = 2
"""Visits of a layer by a batch whose KV cache is loaded before their turn."""
STAGED_TENSORS = 8
"""Compressed tensors that are read by the host, or wait to be expanded, or are: of a decoder's layer and the next."""
_CLOSE = 1e-6
_PREFILL_TOKENS = 2048
"""That keep a processor or a GPU busy. Measured: products of 1,024 rows by narrow matrices (576 columns, bf16, oneDNN)
are half as fast on two processors as those of 2,048."""


def attends_on_host(one_memory: bool, cache_bits: int) -> bool:
    """Whether the host can attend to what lies there; beside a GPU codes of 4 bits cross, which are expanded faster."""
    return one_memory or cache_bits == 16


def prefill_tokens(sequences: int, tokens: int) -> int:
    """Tokens that a layer computes at a time, at most, of a batch of sequences of so many each: some of the sequences
    where they have several tokens.
    """
    return sequences if tokens == 1 else min(sequences * tokens, max(tokens, _PREFILL_TOKENS))


@dataclass(frozen=True)
class Shares:
    """Shares of the bytes of weights, KV cache or activations by tier; they sum to 1.

    gpu: memory of what computes; on a machine without a GPU, the part of host memory that its budget names.
    host, disk: memory of the host, and its drives. device: near-storage drives, which attend where the KV cache lies.
    Raises CommandError for shares below 0 or above 1, or that sum to something else.
    """

    gpu: float = 0.0
    host: float = 0.0
    disk: float = 0.0
    device: float = 0.0

    def __post_init__(self) -> None:
        every = (self.gpu, self.host, self.disk, self.device)
        if not all(0 <= share <= 1 for share in every) or not math.isclose(sum(every), 1, abs_tol=_CLOSE):
            raise CommandError(f"shares must be between 0 and 1 and sum to 1, not {', '.join(map(str, every))}")


@dataclass(frozen=True)
class OffloadPolicy:
    """How a model generates for many prompts with little memory.

    batch_size: sequences that are computed at once. num_batches: batches of a block, for all of which a layer's weights
    are loaded once. overlap: loads and stores run beside the computing. cpu_attention: attention over a KV cache on
    the host is computed there. weight_bits, cache_bits: 16 for the model's own dtype, or 4 for groups of 64 codes with
    a scale and a minimum. stored_fraction: bytes of compressed weights over those at weight_bits, 1 for weights that
    are not compressed. crossing_fraction: the same of what crosses the link to a GPU's own memory, and lies there: some
    forms are expanded before; 0: as they are stored. read_fraction: bytes of K and V that attention reads in a step of
    decode, its index included, over those that are stored.
    Raises CommandError for counts below 1, other bits or fractions, or weights on a device.
    """

    batch_size: int
    num_batches: int
    weights: Shares
    cache: Shares
    activations: Shares
    overlap: bool = True
    cpu_attention: bool = False
    weight_bits: int = 16
    cache_bits: int = 16
    stored_fraction: float = 1.0
    crossing_fraction: float = 0.0
    read_fraction: float = 1.0

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.num_batches < 1:
            raise CommandError(
                f"batch_size and num_batches must be 1 at least, not {self.batch_size}, {self.num_batches}"
            )
        if {self.weight_bits, self.cache_bits} - {4, 16}:
            raise CommandError(f"bits must be 16 or 4, not {self.weight_bits} and {self.cache_bits}")
        for name in ("stored_fraction", "read_fraction"):
            if not 0 < getattr(self, name) <= 1:
                raise CommandError(f"{name} must be above 0 and 1 at most, not {getattr(self, name)}")
        if not 0 <= self.crossing_fraction <= 1:
            raise CommandError(f"crossing_fraction must be between 0 and 1, not {self.crossing_fraction}")
        if self.weights.device or self.activations.device:
            raise CommandError("only the KV cache can lie on a device, not weights or activations")

    @property
    def block_size(self) -> int:
        """Sequences of a block."""
        return self.batch_size * self.num_batches
