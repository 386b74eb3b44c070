"""nearflash's own attention on InstInfer's workload: page selection, by what the simulated engine took.

The engine's cycles a head are measured in cycle-accurate simulation (hardware/attended.toml) and include flash, index,
selection and gathering of heads that overlap; between contexts they follow a power law. Tokens that no index block
covers yet are read whole, at the drive's rate. The GPU and the link are those of systems.instinfer. In `overlapped`,
half of the batch is on the GPU while the drives attend for the other half.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from nearflash.explore.outcome import Outcome
from nearflash.explore.ssd import Ssd
from nearflash.explore.systems.instinfer import KvShare, Serving, instinfer_step
from nearflash.explore.tables import read_part

__all__ = ["MeasuredHeads", "sparf_page_step"]


@dataclass(frozen=True)
class MeasuredHeads:
    """Measured cycles a KV head, by tokens in its context."""

    FILE: ClassVar[str] = "attended"

    source: str
    digest: str
    drive: str
    block_tokens: int
    clock_hz: float
    dim_count: int
    context_tokens: tuple[float, ...]
    head_cycles: tuple[float, ...]
    busy_fraction: tuple[float, ...]
    contexts_count: tuple[float, ...]

    def cycles(self, tokens: float) -> float:
        """Between measured contexts on a line in logarithms, beyond them on the last one's."""
        known = list(zip(self.context_tokens, self.head_cycles, strict=True))
        at = min(max(sum(context <= tokens for context in self.context_tokens) - 1, 0), len(known) - 2)
        (low, first), (high, second) = known[at], known[at + 1]
        slope = math.log(second / first) / math.log(high / low)
        return float(first * (tokens / low) ** slope)


def sparf_page_step(
    serving: Serving, csds: int = 1, *, overlapped: bool = True, block_tokens: int | None = None
) -> Outcome:
    """A decode step of the batch on so many drives with our engine at its measured rate.

    block_tokens: of an index block, in place of the measured build's. Shorter ones leave a shorter suffix to read
    whole; their pages hold more dims, so all of them are read, and the engine takes longer by the bytes.
    """
    measured, shape = read_part(MeasuredHeads, "slc-1400"), serving.shape
    block = block_tokens or measured.block_tokens
    other = instinfer_step(serving, csds, "sparf-page", logits=False)
    heads = serving.batch * shape.layers * math.ceil(shape.kv_heads / csds)
    suffix = serving.suffix(block)
    indexed = (
        measured.cycles(max(1.0, serving.tokens - suffix)) / measured.clock_hz * shape.head_dim / measured.dim_count
    )
    indexed *= _index_factor() if block < measured.block_tokens else 1.0
    suffix_s = 2 * 2 * shape.head_dim * suffix / read_part(Ssd, measured.drive).read_bytes_per_s
    engine = heads * (indexed + suffix_s)
    host = {name: other.phases[name] for name in ("link", "dispatch", "barrier", "GPU")}
    shorter = min(engine, sum(host.values())) if overlapped and serving.batch > 1 else 0.0
    hidden = shorter / 2
    # Of two halves of a batch one waits for the other, so that half of the shorter side is hidden.
    phases = {
        "engine and flash": engine,
        **{name: part * (1 - hidden / sum(host.values())) for name, part in host.items()},
    }
    return Outcome(
        system=f"nearflash sparf-page{'' if block_tokens is None else f' T={block}'}, {csds} CSD",
        model=serving.model,
        phases=phases,
        units=serving.batch,
        hidden={"GPU and link": hidden} | dict(other.hidden),
        memory_bytes=other.memory_bytes,
        capacity_bytes=other.capacity_bytes,
        parts=other.parts,
        traffic_bytes=other.traffic_bytes,
        assumptions=(
            f"cycles a head of build {measured.digest[:12]}, simulated: slc-1400, groups of 4 query heads",
            f"index blocks of {block:,} tokens; the tokens after the last one are read whole",
            "a page in eight gathered, int4 index: loss: docs/results/accuracy.md",
            "half of a batch is on the GPU while the drives attend for the other half" if overlapped else "no overlap",
            "the GPU's share is FlexGen's of its peak",
        ),
    )


def _index_factor() -> float:
    """Bytes of pages where the whole index is read, of what is read of it in the measured build."""
    chosen = read_part(KvShare, "sparf-page")
    return replace(chosen, index_fraction=1.0).flash_fraction(1, 0) / chosen.flash_fraction(1, 0)
