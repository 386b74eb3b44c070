"""A plan in words: the answer in one line, then why, and what would change it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nearflash.planning.cost import predict
from nearflash.planning.policy import Shares
from nearflash.planning.profile import Machine
from nearflash.planning.search import Plan, tokens_per_second_at_best
from nearflash.planning.stages import StageShape
from nearflash.planning.terms import PolicyOptions

__all__ = ["Change", "changes", "count_written_bytes", "explain", "one_line", "summary", "tokens_per_dollar"]

_MORE = 0.25
"""Share of a tier's memory, or of a rate, that is added to see what it would give."""
_RATES = {
    "host to gpu": "links.host_to_gpu_bytes_per_s",
    "disk reads of weights": "disk.read_weights_bytes_per_s",
    "disk reads of the cache": "disk.read_cache_bytes_per_s",
    "matrix products in decode": "compute.matmul_decode_flops_per_s",
    "matrix products in prefill": "compute.matmul_prefill_flops_per_s",
    "gpu memory": "compute.gpu_memory_bytes_per_s",
    "attention on the host": "compute.host_attention_bytes_per_s",
}


@dataclass(frozen=True)
class Change:
    """Tokens a second if the machine had more of something, all else equal."""

    what: str
    tokens_per_second: float


def count_written_bytes(plan: Plan) -> tuple[float, float]:
    """Bytes that a block writes to flash: to disk, to near-storage drives."""
    per_token = plan.prediction.bytes_per_token
    tokens = plan.prediction.generated_tokens
    disk = sum(moved for name, moved in per_token.items() if name.endswith("host to disk"))
    # Queries go over the link, too, but only K and V are written.
    queries = per_token.get("cache device to host", 0.0)
    device = max(0.0, per_token.get("cache host to device", 0.0) - queries)
    return disk * tokens, device * tokens


def tokens_per_dollar(plan: Plan) -> float | None:
    """Generated tokens of a block over the price of its time and of its writes to flash; None without prices."""
    prices = plan.machine.prices
    if prices is None:
        return None
    dollars = plan.prediction.seconds / 3600 * prices.dollars_per_hour
    dollars += sum(count_written_bytes(plan)) * prices.dollars_per_written_byte
    return plan.prediction.generated_tokens / dollars


def one_line(plan: Plan) -> str:
    """Will it fit, how fast, how many bytes and how much wear."""
    prediction, wear = plan.prediction, sum(count_written_bytes(plan))
    disk = sum(prediction.bytes_per_token.get(f"{what} disk to host", 0.0) for what in ("weights", "cache"))
    ranks = "" if plan.ranks == 1 else f"{plan.ranks} ranks of "
    return (
        f"It fits {ranks}{plan.machine.name}: {prediction.tokens_per_second:.3g} token/s over {plan.policy.block_size} "
        f"sequences at once, {_seconds(prediction.seconds)} for all their {prediction.generated_tokens} tokens, "
        f"{_bytes(disk)} read from disk a token, {_bytes(wear)} written to flash; it waits for "
        f"{_waits(prediction.bottleneck)}."
    )


def changes(plan: Plan) -> list[Change]:
    """Speeds with a quarter more of each memory or rate, the most useful first; none below 1 %, nor of ranks."""
    if plan.stages:
        return []
    machine, now = plan.machine, plan.prediction.tokens_per_second
    gains: list[Change] = []
    for tier in ("gpu", "host"):
        key = f"{tier}_bytes"
        more = getattr(machine.memory, key) * _MORE
        larger = machine.with_memory(**{key: getattr(machine.memory, key) + more})
        speed = tokens_per_second_at_best(plan.shape, larger, plan.workload, PolicyOptions.of(plan.policy))
        gains.append(Change(f"{_bytes(more)} more {tier} memory", speed))
    for name, key in _RATES.items():
        if faster := _with_rate(machine, key):
            speed = predict(plan.shape, faster, plan.workload, plan.policy).tokens_per_second
            gains.append(Change(f"{name} {1 + _MORE:.2f} times as fast", speed))
    return sorted((change for change in gains if change.tokens_per_second > now * 1.01),
                  key=lambda change: -change.tokens_per_second)  # fmt: skip


def _with_rate(machine: Machine, key: str) -> Machine | None:
    table, _, name = key.partition(".")
    part = getattr(machine, table)
    if part is None:
        return None
    faster: Machine = replace(machine, **{table: replace(part, **{name: getattr(part, name) * (1 + _MORE)})})
    return faster


def explain(plan: Plan) -> Iterator[str]:
    """All of it, as lines of text."""
    prediction, policy = plan.prediction, plan.policy
    yield one_line(plan)
    yield ""
    yield f"policy      {policy.num_batches} batches of {policy.batch_size} sequences; {_kinds(plan)}"
    for what in ("weights", "cache", "activations"):
        yield f"  {what:<12}{_shares(getattr(policy, what))}"
    yield f"time        prefill {_seconds(prediction.prefill_s)}, decode {_seconds(prediction.decode_s)}"
    for phase, seconds in (("prefill", prediction.prefill), ("decode", prediction.decode)):
        parts = sorted(seconds.items(), key=lambda part: -part[1])
        shown = ", ".join(f"{name} {_seconds(part)}" for name, part in parts if part > 0.005 * max(seconds.values()))
        yield f"  {phase:<12}{shown} (each alone; they overlap)" if policy.overlap else f"  {phase:<12}{shown}"
    yield "bytes a generated token"
    for name, moved in prediction.bytes_per_token.items():
        if moved:
            yield f"  {name:<26}{_bytes(moved)}"
    yield "memory at most (gpu: of what computes; without a GPU, a part of the host's)"
    for peak in plan.peaks.values():
        if peak.limit_bytes:
            fraction = f"{peak.peak_bytes / peak.limit_bytes:.0%} of {_bytes(peak.limit_bytes)}"
            yield (f"  {peak.tier:<12}{_bytes(peak.prefill_bytes)} in prefill, {_bytes(peak.decode_bytes)} in decode "
                   f"({fraction})")  # fmt: skip
    for stage in plan.stages:
        yield _stage_line(stage)
    disk, device = count_written_bytes(plan)
    yield f"wear        {_bytes(disk)} written to disk, {_bytes(device)} to near-storage drives, by a block"
    tokens, prices = tokens_per_dollar(plan), plan.machine.prices
    if prices is not None:
        yield f"price       {tokens:,.0f} tokens a dollar ({prices.source})"
    yield f"waits for   {_waits(prediction.bottleneck)}"
    for change in changes(plan):
        gain = change.tokens_per_second / prediction.tokens_per_second
        yield f"  {change.what}: {change.tokens_per_second:.3g} token/s ({gain:.2f} times as many)"


def summary(plan: Plan) -> dict[str, Any]:
    """The same as plain values for JSON; bytes, seconds, tokens a second."""
    prediction = plan.prediction
    disk, device = count_written_bytes(plan)
    return {
        "machine": plan.machine.name,
        "fits": True,
        "parameters": plan.shape.parameters,
        "block_sequences": plan.policy.block_size,
        "tokens_per_second": prediction.tokens_per_second,
        "decode_tokens_per_second": prediction.decode_tokens_per_second,
        "seconds": prediction.seconds,
        "seconds_to_first_token": prediction.prefill_s,
        "seconds_a_step": prediction.decode_s / max(plan.workload.new_tokens - 1, 1),
        "prefill_seconds": prediction.prefill_s,
        "decode_seconds": prediction.decode_s,
        "prefill_parts_seconds": prediction.prefill,
        "decode_parts_seconds": prediction.decode,
        "bytes_per_token": prediction.bytes_per_token,
        "peak_bytes": {tier: peak.peak_bytes for tier, peak in plan.peaks.items()},
        "limit_bytes": {tier: peak.limit_bytes for tier, peak in plan.peaks.items()},
        "disk_written_bytes": disk,
        "device_written_bytes": device,
        "tokens_per_dollar": tokens_per_dollar(plan),
        "bottleneck": prediction.bottleneck,
        "changes": [{"what": change.what, "tokens_per_second": change.tokens_per_second} for change in changes(plan)],
        "text": one_line(plan),
        "ranks": [_stage_summary(stage) for stage in plan.stages],
    }


def _block_bytes(plan: Plan) -> dict[str, float]:
    """Bytes of a block over each link that is used."""
    tokens = plan.prediction.generated_tokens
    return {link: size * tokens for link, size in plan.prediction.bytes_per_token.items() if size}


def _stage_summary(plan: Plan) -> dict[str, Any]:
    """A rank's layers, its work for all groups in seconds, and its bytes of a block by link and by tier."""
    shape = plan.shape
    assert isinstance(shape, StageShape)
    return {
        "rank": shape.rank,
        "layers": [shape.first, shape.end],
        "prefill_seconds": plan.prediction.prefill_s,
        "decode_seconds": plan.prediction.decode_s,
        "bytes": _block_bytes(plan),
        "peak_bytes": {tier: peak.peak_bytes for tier, peak in plan.peaks.items()},
    }


def _stage_line(plan: Plan) -> str:
    shape, prediction = plan.shape, plan.prediction
    assert isinstance(shape, StageShape)
    moved = ", ".join(f"{link} {_bytes(size)}" for link, size in _block_bytes(plan).items())
    held = ", ".join(f"{tier} {_bytes(peak.peak_bytes)}" for tier, peak in plan.peaks.items() if peak.peak_bytes)
    return (f"{shape.name}: busy {_seconds(prediction.prefill_s)} in prefill, {_seconds(prediction.decode_s)} in "
            f"decode; of a block {moved or 'nothing moved'}; at most {held}")  # fmt: skip


def _kinds(plan: Plan) -> str:
    policy = plan.policy
    attention = (
        "attention on the host for what lies there" if policy.cpu_attention else "attention where the model computes"
    )
    stored = "" if policy.stored_fraction == 1 else f" stored in {policy.stored_fraction:.2f} of their bytes"
    read = "" if policy.read_fraction == 1 else f" of which {policy.read_fraction:.2f} is read"
    return f"{policy.weight_bits}-bit weights{stored}, {policy.cache_bits}-bit cache{read}, {attention}"


def _shares(shares: Shares) -> str:
    parts = {"gpu": shares.gpu, "host": shares.host, "disk": shares.disk, "near-storage drives": shares.device}
    return ", ".join(f"{share:.1%} {tier}" for tier, share in parts.items() if share)


def _waits(bottleneck: str) -> str:
    return f"the link {bottleneck}" if " to " in bottleneck else bottleneck


def _bytes(amount: float) -> str:
    for size, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if amount >= size:
            return f"{amount / size:.3g} {name}"
    return f"{amount:.0f} B"


def _seconds(amount: float) -> str:
    if amount >= 7200:
        return f"{amount / 3600:.3g} h"
    if amount >= 120:
        return f"{amount / 60:.3g} min"
    return f"{amount:.3g} s" if np.isfinite(amount) else "never"
