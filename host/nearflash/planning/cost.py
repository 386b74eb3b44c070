"""How long a block takes: three forms of what overlaps with what.

`paper`: a phase is as long as the longest of host to GPU, GPU to host, disk reads, disk writes and computing.
`released` (FlexGen's code): prefill max(ctog + dtoc, gtoc + ctod, comp), a step of decode ctog + max(gtoc, dtoc, ctod,
comp).
`nearflash`: disk reads and writes share the drive, written cache goes back to it after the page cache took it, what
is exposed and how far loads are ahead are properties of the runtime (Schedule), and near-storage drives attend beside
the GPU.
Without overlap, everything adds up, but for what the page cache writes back while the GPU computes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal, TypeAlias

import numpy as np

from nearflash.abi.errors import PlanError
from nearflash.planning.policy import OffloadPolicy, Shares, attends_on_host
from nearflash.planning.profile import Machine
from nearflash.planning.shapes import Linear, ModelShape
from nearflash.planning.terms import Phase, PolicyOptions, Terms, Vector, Workload, on, shares_vector, terms

__all__ = ["FORMS", "Form", "Prediction", "chains", "expert_seconds", "place_policy", "predict"]

Form: TypeAlias = Literal["nearflash", "released", "paper"]
FORMS: tuple[Form, ...] = ("nearflash", "released", "paper")

_TO_GPU = ("weights to gpu", "activations to gpu", "cache to gpu")
_TO_HOST = ("activations to host", "cache to host")
_FROM_DISK = ("weights from disk", "activations from disk", "cache from disk")
_TO_DISK = ("activations to disk", "cache to disk")
_COMPUTE = ("gpu", "host")
_UNPACK = ("weights unpacked", "cache packed", "cache unpacked")
_STATES = ("activations from disk", "activations to disk", "activations requested")
_AT_DRIVE = ("disk", "cache loaded", "cache stored", "hidden states")
"""Chains of which each has the drive's time in it."""


@dataclass(frozen=True)
class Prediction:
    """Seconds of a block by phase, and what they are made of.

    prefill, decode: seconds of each term alone, of all steps, before overlap. bytes_per_token: over each link, of
    all that the block moves, by generated token. bottleneck: what decode (or prefill, where it is longer) waits for.
    """

    prefill_s: float
    decode_s: float
    generated_tokens: int
    decoded_tokens: int
    prefill: dict[str, float]
    decode: dict[str, float]
    bytes_per_token: dict[str, float]
    bottleneck: str

    @property
    def seconds(self) -> float:
        """Seconds of the block."""
        return self.prefill_s + self.decode_s

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over prefill and decode time."""
        return self.generated_tokens / self.seconds

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens of decode over decode time; 0 for a block that has none."""
        return self.decoded_tokens / self.decode_s if self.decoded_tokens else 0.0

    def breakdown(self, phase: str) -> dict[str, float]:
        """Seconds of a phase as a profiler that waits for every call sees them: compute, weight_read, cache_read,
        cache_write. Weights that are read while the drive still writes cache back wait for it."""
        seconds = self.prefill if phase == "prefill" else self.decode
        get = seconds.get
        late = max(0.0, get("cache to disk", 0.0) - get("cache to page cache", 0.0)) if phase == "prefill" else 0.0
        writes = ("cache to host", "cache to page cache") if phase == "prefill" else ("cache to host", "cache to disk")
        return {
            "compute": sum(get(name, 0.0) for name in (*_COMPUTE, *_UNPACK, "device")),
            "weight_read": get("weights to gpu", 0.0) + get("weights from disk", 0.0) + late,
            "cache_read": get("cache to gpu", 0.0) + get("cache from disk", 0.0),
            "cache_write": sum(get(name, 0.0) for name in writes),
        }


def _sum(phase: Phase, names: Sequence[str]) -> Vector:
    return reduce(np.add, (phase[name] for name in names if name in phase), on(0))


def chains(
    phases: Terms, machine: Machine, options: PolicyOptions, form: Form = "nearflash"
) -> tuple[dict[str, Vector], dict[str, Vector]]:  # fmt: skip
    """Sums of which the longest is a phase's time, with overlap: of prefill and of a step of decode."""
    parts = [
        {
            "host to gpu": _sum(phase, _TO_GPU),
            "gpu to host": _sum(phase, _TO_HOST),
            "disk reads": _sum(phase, _FROM_DISK),
            "disk writes": _sum(phase, _TO_DISK),
            "computing": _sum(phase, _COMPUTE if form == "nearflash" else (*_COMPUTE, *_UNPACK)),
        }
        for phase in (phases.prefill, phases.decode)
    ]
    if form == "paper":
        return parts[0], parts[1]
    prefill, decode = parts
    if form == "released":
        return {
            "host to gpu": prefill["host to gpu"] + prefill["disk reads"],
            "gpu to host": prefill["gpu to host"] + prefill["disk writes"],
            "computing": prefill["computing"],
        }, {name: decode["host to gpu"] + part for name, part in decode.items() if name != "host to gpu"}
    schedule = machine.schedule
    for part, phase in ((prefill, phases.prefill), (decode, phases.decode)):
        copies, reads = part["host to gpu"] + part["gpu to host"], part.pop("disk reads")
        part["disk"] = reads + part.pop("disk writes") + schedule.reads_lost_to_computing * part["computing"]
        if machine.links.one_memory:
            # Threads beside what computes; of the cache's, each unpacks what it loads, or packs what it stores.
            part["cache loaded"] = _sum(phase, ("cache from disk", "cache unpacked"))
            part["cache stored"] = _sum(phase, ("cache packed", "cache to disk"))
        if machine.runs_on_gpu and options.cpu_attention and options.num_batches > 1 and "host" in phase:
            # The host attends for a batch while the GPU computes another, but for a layer's first and last ones.
            there, here, shown = phase["host"], phase["gpu"], 1 / options.num_batches
            part["computing"], part["host attention"] = here + shown * there, there + shown * here
        # Read for the next batch while one computes, and written behind the last; a single batch waits for both.
        states = _sum(phase, _STATES)
        if options.num_batches > 1:
            part["hidden states"] = states
        else:
            part["computing"] = part["computing"] + states
        # Unpacking takes the processors that compute, or the GPU: beside each other they are no faster.
        part["computing"] = (
            part["computing"] + _sum(phase, _UNPACK)
            + schedule.computing_lost_to_reads * reads + schedule.computing_lost_to_copies * copies
        )  # fmt: skip
        if "device" in phase:
            part["device link"] = phase["device link"]
            # Drives attend for one batch while the GPU multiplies for another.
            if options.num_batches > 1:
                part["device"] = phase["device"]
            else:
                part["computing"] = part["computing"] + phase["device"]
    exposed = machine.schedule.exposed_weight_loads * _sum(phases.decode, ("weights to gpu", "activations to gpu"))
    hidden = decode["host to gpu"] - exposed
    return prefill, {**{name: part + exposed for name, part in decode.items()}, "host to gpu": hidden + exposed}


def predict(
    shape: ModelShape, machine: Machine, workload: Workload, policy: OffloadPolicy, form: Form = "nearflash"
) -> Prediction:
    """The time of a block under a policy. Raises PlanError for shares on tiers that the machine does not have."""
    if machine.disk is None and (policy.weights.disk or policy.cache.disk or policy.activations.disk):
        raise PlanError("shares on disk must be 0: the machine's profile has no table [disk]")
    if machine.device is None and policy.cache.device:
        raise PlanError("shares on a device must be 0: the machine's profile has no table [device]")
    placed = place_policy(shape, machine, policy)
    options, shares = PolicyOptions.of(placed), shares_vector(placed)
    phases = terms(shape, machine, workload, options)
    steps = workload.new_tokens - 1
    prefill = {name: float(vector @ shares) for name, vector in phases.prefill.items()}
    decode = {name: float(vector @ shares) * steps for name, vector in phases.decode.items()}
    prefill_s, decode_s, phases_s = _without_overlap(prefill), sum(decode.values()), [prefill, decode]
    if policy.overlap:
        both = chains(phases, machine, options, form)
        phases_s = [{name: float(vector @ shares) for name, vector in part.items()} for part in both]
        ahead = machine.schedule.visits_ahead if form == "nearflash" else 0
        # What each loses to the other is at most what one after the other takes.
        prefill_s = min(prefill_s, _beside(phases_s[0], ahead))
        decode_s = min(decode_s, _beside(phases_s[1], ahead) * steps)
    slower = phases_s[decode_s >= prefill_s]
    tokens = policy.block_size * workload.new_tokens
    moved = {}
    for name in {**phases.prefill_bytes, **phases.decode_bytes}:
        total = float(phases.prefill_bytes.get(name, on(0)) @ shares)
        total += float(phases.decode_bytes.get(name, on(0)) @ shares) * steps
        moved[name] = total / tokens
    return Prediction(prefill_s, decode_s, tokens, policy.block_size * steps, prefill, decode, moved,
                      bottleneck=max(slower, key=slower.__getitem__))  # fmt: skip


def _beside(parts: Mapping[str, float], visits_ahead: int) -> float:
    """The time of what goes on beside each other: the longest, and what it waits for the second where loads may be so
    many visits ahead and no two take the same time. Threads that wait for the drive are one part with it.

    As a server with a queue (M/M/1/K, K two more than the visits: loads that vary by .8 of their mean). Measured with
    weights and KV on disk: 1.2 to 1.3 times the longest where both take as long, at most 1.1 where the second takes
    half. Source: Gross and Harris, Fundamentals of Queueing Theory, section 2.5.
    """
    drive = max((seconds for name, seconds in parts.items() if name in _AT_DRIVE), default=0.0)
    others = [seconds for name, seconds in parts.items() if name not in _AT_DRIVE]
    second, longest = sorted((0.0, drive, *others))[-2:]
    if not visits_ahead or not longest:
        return longest
    powers = [(second / longest) ** power for power in range(visits_ahead + 3)]
    return longest * sum(powers) / sum(powers[:-1])


def expert_seconds(
    shape: ModelShape, machine: Machine, workload: Workload, policy: OffloadPolicy, share: float
) -> tuple[float, float]:
    """Prefill and decode of the first block, where experts on disk are read as they are routed and memory has room for
    this share of them.

    None is in memory at first: prefill reads all that are routed. In decode those that memory does not hold are read
    while others are computed; experts that were guessed wrong, and the first read of a layer, are not counted.
    Raises PlanError as `predict`.
    """
    weights = policy.weights
    kept = share * weights.disk
    cached = replace(weights, gpu=weights.gpu + kept, disk=weights.disk - kept)
    prefill = predict(shape, machine, workload, policy)
    decode = predict(shape, machine, workload, replace(policy, weights=cached))
    return prefill.prefill_s, decode.decode_s


def _without_overlap(prefill: dict[str, float]) -> float:
    """The sum, of which the page cache writes back beside what computes."""
    back = prefill.get("cache to disk", 0.0)
    buffered = prefill.get("cache to page cache", 0.0)
    left = max(0.0, back - buffered - prefill["gpu"])
    return sum(prefill.values()) - back + left


def place_policy(shape: ModelShape, machine: Machine, policy: OffloadPolicy) -> OffloadPolicy:
    """The policy as the machine's runtime follows it: a GPU attends to a cache of 4 bits; where it places tensors,
    shares of weights become theirs.

    FlexGen puts a tensor where its middle falls when a layer's (attention's, and the FFN's) lie in a row: disk first,
    then host, then GPU.
    """
    policy = replace(
        policy, cpu_attention=policy.cpu_attention and attends_on_host(machine.links.one_memory, policy.cache_bits)
    )
    if not machine.schedule.places_tensors:
        return policy
    totals = {"gpu": 0.0, "host": 0.0, "disk": 0.0}
    for layer, number in shape.kinds:
        attention = [linear for linear in layer.linears if "attn" in linear.name or "attention" in linear.name]
        for part in (attention, [linear for linear in layer.linears if linear not in attention]):
            _place(part, number, policy.weights, totals)
    every = sum(totals.values())
    return replace(policy, weights=Shares(**{tier: part / every for tier, part in totals.items()}))


def _place(linears: Sequence[Linear], number: int, shares: Shares, totals: dict[str, float]) -> None:
    size, before = sum(linear.parameters for linear in linears), 0
    for linear in linears:
        middle = (before + linear.parameters / 2) / size
        tier = "disk" if middle < shares.disk else "host" if middle < shares.disk + shares.host else "gpu"
        totals[tier] += number * linear.parameters
        before += linear.parameters
