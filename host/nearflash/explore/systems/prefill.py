"""Prefill on KVNAND and its baselines: seconds until the first token of a prompt.

Weights are multiplied where that is faster: beside the planes, whose few multipliers then bound it, or on the NPU, to
which weights cross the flash interface once for each chunk of tokens whose hidden states its memory holds. Attention is
on the NPU; K and V of chunks before cross to it again. Pages of K and V are programmed meanwhile.

Source: rates of KVNAND; the schedule is ours.
"""

from math import ceil

from nearflash.explore.links import DramMemory
from nearflash.explore.outcome import Outcome
from nearflash.explore.processors import Npu
from nearflash.explore.systems.ifc import BASE_DIES, QUANTS, Arrangement, Decode, Die
from nearflash.explore.systems.kvnand import decode_step
from nearflash.explore.tables import read_part

__all__ = ["prefill_step"]


def prefill_step(prompt: Decode, arrangement: Arrangement) -> Outcome:
    """All of a prompt of `prompt.context` tokens, at once; `fits` as of a decode step behind it."""
    die, npu = read_part(Die, "kvnand"), read_part(Npu, "kvnand")
    shape, tokens = prompt.shape, prompt.context
    chunks = ceil(tokens * 2 * shape.hidden * prompt.value_bytes / npu.buffer_bytes)
    macs = tokens * shape.active
    in_flash = macs / (arrangement.weights * die.planes_count * die.fmac_count * die.clock_hz)
    crossing = chunks * _weights_read(prompt) / (arrangement.weights * die.link_bytes_per_s)
    on_npu = max(crossing, npu.matrix_seconds(macs))
    again = prompt.kv_bytes * (chunks - 1) / 2 / _kv_bytes_per_s(arrangement, die)
    attention = npu.matrix_seconds(shape.layers * shape.heads * shape.head_dim * float(tokens) ** 2)
    phases = {"weights": min(in_flash, on_npu), "attention": max(attention, again)}
    program = _write_seconds(prompt, arrangement, die)
    late = max(0.0, program - sum(phases.values()))
    step = decode_step(prompt, arrangement)
    return Outcome(
        system=arrangement.name,
        model=prompt.model,
        phases=phases | {"KV write": late},
        hidden={"KV write": program - late},
        memory_bytes=step.memory_bytes,
        capacity_bytes=step.capacity_bytes,
        traffic_bytes={"weights": _weights_read(prompt) * (chunks if on_npu < in_flash else 1)},
        assumptions=("the NPU's 5 MB hold the hidden states of a chunk", "K and V are programmed while layers compute",
                     f"weights are multiplied {'on the NPU' if on_npu < in_flash else 'beside the planes'}"),
    )  # fmt: skip


def _weights_read(prompt: Decode) -> float:
    """Bytes of weights that a chunk reads: of experts all, as its tokens are routed to different ones."""
    return prompt.shape.parameters * QUANTS[prompt.quant][0] / 8


def _kv_bytes_per_s(arrangement: Arrangement, die: Die) -> float:
    if arrangement.kind == "Base-1":
        return BASE_DIES * read_part(DramMemory, "lpddr5x").bytes_per_s
    return arrangement.kv_dies * die.link_bytes_per_s


def _write_seconds(prompt: Decode, arrangement: Arrangement, die: Die) -> float:
    crossing = prompt.kv_bytes / _kv_bytes_per_s(arrangement, die)
    if arrangement.kind == "Base-1":
        return crossing
    pages = prompt.kv_bytes / (die.page_bytes * arrangement.kv_dies * die.planes_count)
    return max(crossing, pages * die.program_us * 1e-6)
