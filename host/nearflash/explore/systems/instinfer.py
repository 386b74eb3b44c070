"""InstInfer: KV and decode attention in computational storage, beside FlexGen and DeepSpeed on the same host.

A decode step of InstInfer is three parts that follow one another: flash gives the KV pages, the engine computes, the
GPU does the rest. The engine has one kernel for Q·K and one for P·V with half of the lanes each; K comes before V, so
one of them works at a time. Heads are divided among the drives. More drives do not shorten what is there once: the
GPU's work, dispatching a command for each sequence and KV head, the GPU's link, over which queries and new KV go and
logits, softmax sums and outputs come back, and a barrier a layer. FlexGen and DeepSpeed are in systems.flexgen.

Source: InstInfer (arXiv 2409.04992); selection shares of pages: hardware/selection.toml.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from nearflash.abi.errors import PlanError
from nearflash.explore.outcome import Outcome
from nearflash.explore.processors import Gpu, Runtime
from nearflash.explore.shapes import Decoder, decoder
from nearflash.explore.tables import read_part

__all__ = ["Csd", "KvShare", "Serving", "instinfer_step", "instinfer_throughput"]

_SUM_BYTES = 8
"""The maximum and the sum of a softmax, in fp32."""
_ASSUMPTIONS = (
    "flash, engine and GPU follow one another, as InstInfer's breakdown shows",
    "flash at the channels' raw rate: the paper counts neither spare bytes nor commands",
    "new KV is programmed meanwhile",
    "the host submits a command for each sequence and KV head, one core for all drives",
)


@dataclass(frozen=True)
class Csd:
    """A drive that attends: flash channels, and kernels of lanes that multiply one fp16 pair a cycle."""

    source: str
    channels_count: int
    channel_bytes_per_s: float
    clock_hz: float
    dsps_count: int
    dsps_per_lane_count: int
    kernel_count: int
    keys_per_cycle_count: int
    host_link_bytes_per_s: float
    dispatch_us: float
    barrier_us: float

    @property
    def flash_bytes_per_s(self) -> float:
        """Rate of all channels."""
        return self.channels_count * self.channel_bytes_per_s

    @property
    def macs_per_s(self) -> float:
        """Rate of the one kernel that works."""
        return self.dsps_count / self.dsps_per_lane_count / self.kernel_count * self.clock_hz


@dataclass(frozen=True)
class KvShare:
    """Which share of the KV an attention reads and multiplies, of dense.

    token, index: of token pages, and of index pages, which have so many bits an element and cover blocks of tokens.
    interleaved: a token page has K and V. qk, pv: multiplications. keys: approximate scores selected from, a token;
    copies: bytes kept, of one copy of K and V.
    """

    FILE: ClassVar[str] = "selection"

    source: str
    token_fraction: float
    index_fraction: float
    index_bits: float
    block_tokens: int
    interleaved: bool
    qk_fraction: float
    pv_fraction: float
    keys_count: int
    copies_count: float

    def flash_fraction(self, tokens: float, suffix: float) -> float:
        """Bytes of pages read, of dense, with so many tokens, of which a suffix has no index block yet.

        Of the suffix all of K is read, beside what of it was selected; all of V too where both lie in one page.
        """
        index = 0.5 * self.index_fraction * self.index_bits / 16 * (tokens - suffix)
        extra = (1.0 if self.interleaved else 0.5) * (1 - self.token_fraction) * suffix
        return (self.token_fraction * tokens + index + extra) / tokens


@dataclass(frozen=True)
class Serving:
    """A batch of sequences: prompt and new tokens, sequences at once. Raises PlanError for counts below 1."""

    model: str = "opt-13b"
    prompt: int = 1024
    new: int = 1024
    batch: int = 64

    def __post_init__(self) -> None:
        if min(self.prompt, self.new, self.batch) < 1:
            raise PlanError(f"prompt, new and batch must be 1 at least, not {self.prompt}, {self.new}, {self.batch}")

    @property
    def tokens(self) -> float:
        """In a sequence's cache, on average over decode."""
        return self.prompt + self.new / 2

    def suffix(self, block_tokens: int) -> float:
        """Tokens after the last whole block of an index, on average over decode."""
        return _mean_rest(self.prompt, self.new, block_tokens)

    @property
    def shape(self) -> Decoder:
        """Shape of the model."""
        return decoder(self.model)

    @property
    def kv_bytes(self) -> float:
        """K and V of the batch in fp16, on average over decode."""
        return 2 * self.shape.kv * self.tokens * self.batch


@cache
def _mean_rest(first: int, count: int, block: int) -> float:
    """The mean of t mod `block` over `count` numbers from `first`."""

    def below(end: int) -> int:
        rounds, rest_tokens = divmod(end, block)
        return (rounds * block * (block - 1) + rest_tokens * (rest_tokens - 1)) // 2

    return (below(first + count) - below(first)) / count


def instinfer_step(
    serving: Serving,
    csds: int = 1,
    selection: str = "dense",
    gpu: str = "a6000",
    csd: Csd | None = None,
    *,
    logits: bool = True,
) -> Outcome:
    """An average decode step of the batch on so many drives. logits: they come back. Raises PlanError for no drives."""
    if csds < 1:
        raise PlanError(f"csds must be 1 at least, not {csds}")
    drive, chosen = csd or read_part(Csd, "instinfer"), read_part(KvShare, selection)
    shape, part = serving.shape, read_part(Gpu, gpu)
    runtime = read_part(Runtime, "flexgen")
    # Heads are what drives divide: one with more of them than the others is the last to finish.
    share = math.ceil(shape.kv_heads / csds) / shape.kv_heads
    read = serving.kv_bytes * chosen.flash_fraction(serving.tokens, serving.suffix(chosen.block_tokens))
    macs = shape.group * serving.kv_bytes / 4
    heads = serving.batch * shape.kv_heads * shape.layers
    new = 2 * shape.kv * serving.batch
    query_heads = shape.heads * shape.layers * serving.batch
    sent = 2 * shape.head_dim * query_heads + new
    back: float = (2 * shape.head_dim + _SUM_BYTES) * query_heads
    back += 2 * chosen.pv_fraction * serving.tokens * query_heads if logits else 0.0
    phases = {
        "flash": share * read / drive.flash_bytes_per_s,
        "engine Q·K": share * macs * chosen.qk_fraction / drive.macs_per_s,
        "engine P·V": share * macs * chosen.pv_fraction / drive.macs_per_s,
        "engine select": share
        * heads
        * serving.tokens
        * chosen.keys_count
        / (drive.keys_per_cycle_count * drive.clock_hz),
        "link": (sent + back) / drive.host_link_bytes_per_s,
        "dispatch": heads * drive.dispatch_us * 1e-6,
        "barrier": shape.layers * drive.barrier_us * 1e-6,
        "GPU": part.seconds(2 * shape.active * serving.batch, 2 * shape.active, runtime.decode_fraction),
    }
    return Outcome(
        system=f"InstInfer {selection}, {csds} CSD",
        model=serving.model,
        phases=phases,
        units=serving.batch,
        hidden={"KV program": share * new * chosen.copies_count / drive.flash_bytes_per_s},
        memory_bytes={"GPU": 2 * shape.parameters, "flash of a drive": share * chosen.copies_count * 2 * shape.kv
                      * serving.batch * (serving.prompt + serving.new)},
        capacity_bytes={"GPU": part.memory_bytes},
        parts={gpu: 1, "host": 1, "csd": csds},
        traffic_bytes={"flash": read, "host link": sent + back},
        assumptions=_ASSUMPTIONS,
    )  # fmt: skip


def instinfer_throughput(serving: Serving, csds: int = 1, selection: str = "dense") -> float:
    """Tokens a second over prefill and decode. In prefill KV goes to flash while the GPU computes."""
    step = instinfer_step(serving, csds, selection)
    part, runtime = read_part(Gpu, "a6000"), read_part(Runtime, "flexgen")
    shape = serving.shape
    flops = 2 * shape.active * serving.batch * serving.prompt
    prefill = part.seconds(flops, 2 * shape.active, runtime.prefill_fraction)
    return serving.batch * serving.new / (prefill + serving.new * step.seconds)
