"""Peak bytes on each tier, during prefill and after it: what lies there, and what passes through.

GPU: home shares, two layers' worth of weights that live elsewhere (one computes, one loads), buffers of KV that live
elsewhere and are attended to here, activations of a batch, and the widest of what one layer computes. Host: home
shares, pinned buffers that everything on the disk passes through, and attention's working set where it runs there.
In one memory weights are read to where they are used, stored bytes of a few tensors at a time where these are expanded;
and what one of the two tiers leaves of its room is the other's.
Each is linear in the shares, as in nearflash.planning.terms.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from nearflash.planning.cost import place_policy
from nearflash.planning.policy import STAGED_TENSORS, VISITS_AHEAD, OffloadPolicy, prefill_tokens
from nearflash.planning.profile import Machine
from nearflash.planning.shapes import ModelShape, bytes_of
from nearflash.planning.terms import PolicyOptions, Vector, Workload, on, shares_vector

__all__ = ["ALIGNMENT_BYTES", "TIERS", "Peak", "bounds", "peak_vectors", "peaks"]

TIERS = ("gpu", "host", "disk", "device")
ALIGNMENT_BYTES = 64 << 10
"""What aligned tensors of a layer leave unused, at most: a page of 4 KiB for each of 16."""
_BUFFERS = 2
"""A layer's or batch's bytes that compute, and the next one's that load."""


@dataclass(frozen=True)
class Peak:
    """Most bytes on a tier: in prefill, in decode; `limit_bytes` that it has, in one memory what the other leaves."""

    tier: str
    prefill_bytes: float
    decode_bytes: float
    limit_bytes: float

    @property
    def peak_bytes(self) -> float:
        """Bytes at most in both phases."""
        return max(self.prefill_bytes, self.decode_bytes)

    @property
    def fits(self) -> bool:
        """No more than the tier has."""
        return self.peak_bytes <= self.limit_bytes


def bounds(
    machine: Machine, vectors: Mapping[str, tuple[Vector, Vector]]
) -> Iterator[tuple[float, tuple[Vector, Vector]]]:
    """Bytes that there are, and the peaks that must fit them: of each tier, gpu and host together in one memory."""
    every = _limits(machine)
    if machine.links.one_memory:
        together = vectors["gpu"][0] + vectors["host"][0], vectors["gpu"][1] + vectors["host"][1]
        vectors = {**vectors, "gpu": together}
        every["gpu"] += every.pop("host")
    yield from ((room, vectors[tier]) for tier, room in every.items())


def _limits(machine: Machine) -> dict[str, float]:
    """Bytes of each tier that a plan may fill by its own budget."""
    device = machine.device.cache_bytes if machine.device else 0.0
    disk = machine.memory.disk_bytes if machine.disk else 0.0
    return {"gpu": machine.memory.gpu_bytes, "host": machine.memory.host_bytes, "disk": disk, "device": device}


def peaks(shape: ModelShape, machine: Machine, workload: Workload, policy: OffloadPolicy) -> dict[str, Peak]:
    """The peaks of a policy by tier."""
    placed = place_policy(shape, machine, policy)
    shares, vectors = shares_vector(placed), peak_vectors(shape, machine, workload, PolicyOptions.of(placed))
    every = _limits(machine)
    by_tier = {}
    for tier in TIERS:
        prefill, decode = (float(vector @ shares) for vector in vectors[tier])
        by_tier[tier] = Peak(tier, prefill, decode, every[tier])
    if machine.links.one_memory:
        gpu, host = by_tier["gpu"], by_tier["host"]
        room = gpu.limit_bytes + host.limit_bytes
        for one, other in ((gpu, host), (host, gpu)):
            by_tier[one.tier] = replace(one, limit_bytes=max(0.0, room - other.peak_bytes))
    return by_tier


def peak_vectors(
    shape: ModelShape, machine: Machine, workload: Workload, options: PolicyOptions
) -> Mapping[str, tuple[Vector, Vector]]:
    """Peaks in prefill and in decode, by tier."""
    home = _home(shape, machine, workload, options)
    phases = [_working(shape, machine, workload, options, tokens) for tokens in (workload.prompt_tokens, 1)]
    none = np.zeros_like(home["gpu"])
    return {tier: (home[tier] + phases[0].get(tier, none), home[tier] + phases[1].get(tier, none)) for tier in TIERS}


def _home(shape: ModelShape, machine: Machine, workload: Workload, options: PolicyOptions) -> dict[str, Vector]:
    """Bytes that stay where their share is; the KV cache at its full length, which is allocated at once."""
    aligned = ALIGNMENT_BYTES * len(shape.layers)
    weights, _ = shape.weight_bytes(options.weight_bits, options.stored_fraction)
    far, _ = shape.weight_bytes(options.weight_bits, options.far_fraction(machine))
    weights, far = weights + aligned, far + aligned
    outside = shape.element_bytes * shape.outside
    fixed = on(0)
    if machine.schedule.offloads_embeddings:
        weights, far = weights + outside, far + outside
    else:
        fixed = on(outside)
    tokens = workload.prompt_tokens + workload.new_tokens
    dense = shape.kv_bytes_per_token * options.held_size * tokens
    cache = dense * bytes_of(1, options.cache_bits, shape.element_bytes) / shape.element_bytes
    # Activations between two layers: of one layer at a time.
    states = shape.element_bytes * shape.hidden * options.held_size * workload.prompt_tokens
    home = {
        tier: on(far if tier == "gpu" else weights, f"weights.{tier}")
        + on(cache, f"cache.{tier}")
        + on(states, f"activations.{tier}")
        for tier in ("gpu", "host", "disk")
    }
    home["gpu"] = home["gpu"] + fixed
    return home | {"device": on(cache, "cache.device")}


def _working(
    shape: ModelShape, machine: Machine, workload: Workload, options: PolicyOptions, tokens: int
) -> dict[str, Vector]:
    """Bytes that pass through while a batch computes `tokens` tokens of each sequence."""
    batch = options.batch_size
    stored, passing = (
        shape.weight_bytes(options.weight_bits, fraction)[1] + ALIGNMENT_BYTES
        for fraction in (options.stored_fraction, options.far_fraction(machine))
    )
    if machine.schedule.offloads_embeddings:
        stored, passing = (max(size, shape.element_bytes * shape.head) for size in (stored, passing))
    packed = options.weight_bits != 16 or options.far_fraction(machine) < 1
    # One layer as it computes, where the stored form is another; in one memory each buffer is of such.
    unpacked = shape.element_bytes * shape.largest_layer.parameters + ALIGNMENT_BYTES if packed else 0
    if packed and machine.links.one_memory:
        unpacked, passing = _BUFFERS * unpacked, 0
    cache = shape.kv_layer_bytes * batch * (workload.prompt_tokens + workload.new_tokens)
    states = shape.element_bytes * shape.hidden * batch * tokens
    gpu = on(_BUFFERS * passing, "weights.host", "weights.disk") + on(unpacked)
    gpu = gpu + on(_BUFFERS * states, "activations.host", "activations.disk")
    gpu = gpu + on(_computing_bytes(shape, machine, workload, options, tokens))
    # Prefill makes a batch's KV here; decode reads back what is attended to here.
    afar = ("cache.host", "cache.disk")
    packed_cache = cache * bytes_of(1, options.cache_bits, shape.element_bytes) / shape.element_bytes
    staged = machine.runs_on_gpu
    if tokens > 1:
        passed = () if staged and not options.cpu_attention else afar
        gpu = gpu + on(_BUFFERS * shape.kv_layer_bytes * batch * tokens, *passed, "cache.device")
    if staged and options.cache_bits != 16:  # a buffer of each visit ahead, with what comes out of codes
        gpu = gpu + on((VISITS_AHEAD + 1) * (packed_cache + cache), "cache.gpu", *afar)
    elif not options.cpu_attention and (staged or tokens == 1):
        gpu = gpu + on((VISITS_AHEAD + 1 if staged else _BUFFERS) * cache, *afar)
    if options.cache_bits != 16 and not staged:
        gpu = gpu + on(cache, "cache.gpu")
    through = 0.0 if machine.links.one_memory else _BUFFERS * max(stored, passing)
    if options.stored_fraction < 1 and (machine.links.one_memory or passing > stored):
        through += STAGED_TENSORS * _largest_stored(shape, options)
    host = on(through, "weights.disk") + on(_BUFFERS * states, "activations.disk")
    host = host + on((VISITS_AHEAD + 1) * packed_cache if staged else _BUFFERS * cache, "cache.disk")
    if passing > stored:  # what the host expands first
        host = host + on(_BUFFERS * passing, "weights.host")
    if options.cpu_attention and tokens == 1:
        # K and V of a batch in fp32, as the host computes.
        host = host + on(4 / shape.element_bytes * cache, *afar)
    return {"gpu": gpu, "host": host}


def _largest_stored(shape: ModelShape, options: PolicyOptions) -> float:
    """Stored bytes of the largest matrix."""
    largest = max(linear.parameters for layer, _ in shape.kinds for linear in layer.linears)
    return bytes_of(largest, options.weight_bits, shape.element_bytes) * options.stored_fraction


def _computing_bytes(
    shape: ModelShape, machine: Machine, workload: Workload, options: PolicyOptions, tokens: int
) -> float:
    """The largest of what attention, the FFN and the logits of one batch need at a time."""
    batch, element_bytes = options.batch_size, shape.element_bytes
    context = workload.prompt_tokens + workload.new_tokens
    # Experts are read once for a batch, and a device attends for a batch.
    whole = machine.schedule.full_prefill or machine.device is not None or any(layer.experts for layer in shape.layers)
    part = batch * tokens if whole else prefill_tokens(batch, tokens)
    hidden = element_bytes * shape.hidden
    queries = element_bytes * part * shape.heads * shape.head_dim
    scores = 0
    if tokens == 1 or machine.schedule.stores_scores:
        scores = 2 * element_bytes * part * shape.heads * (context if tokens == 1 else tokens)
    # Hidden states of the batch, before and after a layer that computes a part of it.
    around = 2 * batch * tokens * hidden if part < batch * tokens else 0
    attention = 2 * part * hidden + 3 * queries + scores + shape.kv_layer_bytes * part
    ffn = 2 * part * hidden + 2 * element_bytes * part * shape.widest
    logits = batch * tokens * hidden + (element_bytes + 4) * batch * shape.vocabulary
    return float(max(around + max(attention, ffn), logits))
