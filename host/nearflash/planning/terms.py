"""Bytes and seconds of each phase, as sums over the shares of a policy.

Every quantity is linear in the shares, so that one description serves the prediction (a dot product) and the search (a
row of a linear program). A Vector holds a coefficient for each of VARIABLES and, last, a constant.

Sources: FlexGen (arXiv 2303.06865), appendix, and its released cost model, for a layer of any shape; ours are the
floor of GPU memory's bandwidth, expected distinct experts, quantised and compressed bytes, and near-storage drives.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import PlanError
from nearflash.planning.policy import OffloadPolicy
from nearflash.planning.profile import Machine
from nearflash.planning.shapes import LayerShape, ModelShape, bytes_of

__all__ = ["VARIABLES", "Phase", "PolicyOptions", "Terms", "Vector", "Workload", "on", "shares_vector", "terms"]

Vector: TypeAlias = NDArray[np.float64]
Phase: TypeAlias = Mapping[str, Vector]

VARIABLES = (
    "weights.gpu", "weights.host", "weights.disk",
    "cache.gpu", "cache.host", "cache.disk", "cache.device",
    "activations.gpu", "activations.host", "activations.disk",
)  # fmt: skip
_AT = {name: at for at, name in enumerate(VARIABLES)}


@dataclass(frozen=True)
class Workload:
    """Tokens of a prompt, and tokens generated for each. Raises PlanError for counts below 1."""

    prompt_tokens: int
    new_tokens: int

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.new_tokens < 1:
            counts = f"{self.prompt_tokens} and {self.new_tokens}"
            raise PlanError(f"prompt_tokens and new_tokens must be 1 at least, not {counts}")

    @property
    def average_tokens(self) -> float:
        """Tokens in the cache of a sequence, on average over the steps of decode."""
        return self.prompt_tokens + self.new_tokens / 2


@dataclass(frozen=True)
class PolicyOptions:
    """A policy without its shares. groups: of num_batches batches each; one of them is computed at a time, the KV cache
    and the hidden states of all of them are held.
    """

    batch_size: int
    num_batches: int
    cpu_attention: bool = False
    weight_bits: int = 16
    cache_bits: int = 16
    stored_fraction: float = 1.0
    read_fraction: float = 1.0
    crossing_fraction: float = 0.0
    groups: int = 1

    @classmethod
    def of(cls, policy: OffloadPolicy) -> "PolicyOptions":
        """The options of a policy."""
        return cls(
            policy.batch_size, policy.num_batches, policy.cpu_attention, policy.weight_bits, policy.cache_bits,
            policy.stored_fraction, policy.read_fraction, policy.crossing_fraction,
        )  # fmt: skip

    def far_fraction(self, machine: Machine) -> float:
        """Bytes of weights where they are computed with, over dense ones at weight_bits."""
        return self.stored_fraction if machine.links.one_memory else self.crossing_fraction or self.stored_fraction

    @property
    def block_size(self) -> int:
        """Sequences that are computed at a time: a block, or one of its groups."""
        return self.batch_size * self.num_batches

    @property
    def held_size(self) -> int:
        """Sequences of all groups."""
        return self.block_size * self.groups


@dataclass(frozen=True)
class Terms:
    """Seconds and bytes of one pass over all layers, by name: of prefill, and of an average step of decode."""

    prefill: Phase
    decode: Phase
    prefill_bytes: Phase
    decode_bytes: Phase


def shares_vector(policy: OffloadPolicy) -> Vector:
    """The shares of a policy in the order of VARIABLES, and 1."""
    weights, cache, states = policy.weights, policy.cache, policy.activations
    return np.array([weights.gpu, weights.host, weights.disk, cache.gpu, cache.host, cache.disk, cache.device,
                     states.gpu, states.host, states.disk, 1.0])  # fmt: skip


def on(amount: float, *names: str) -> Vector:
    """`amount` times the sum of the named shares; without names, the constant."""
    vector = np.zeros(len(VARIABLES) + 1)
    vector[[_AT[name] for name in names] or [-1]] = amount
    return vector


def terms(shape: ModelShape, machine: Machine, workload: Workload, options: PolicyOptions) -> Terms:
    """Everything that a block costs, before overlap."""
    sizes = _Sizes(shape, machine, workload, options)
    prefill_bytes, decode_bytes = _prefill_bytes(sizes), _decode_bytes(sizes)
    return Terms(
        prefill=_prefill_seconds(sizes, prefill_bytes),
        decode=_decode_seconds(sizes, decode_bytes),
        prefill_bytes=prefill_bytes,
        decode_bytes=decode_bytes,
    )


class _Sizes:
    """Bytes that a phase handles, whatever the shares; `cache` and `states` of all layers."""

    def __init__(self, shape: ModelShape, machine: Machine, workload: Workload, options: PolicyOptions) -> None:
        self.shape, self.machine, self.workload, self.options = shape, machine, workload, options
        block = options.block_size
        token, seen = shape.kv_bytes_per_token * block, block * shape.visible_kv_bytes(workload.average_tokens)
        ratio = bytes_of(1, options.cache_bits, shape.element_bytes) / shape.element_bytes
        self.cache_prefill_dense = token * workload.prompt_tokens
        self.cache_prefill = self.cache_prefill_dense * ratio
        read = seen * options.read_fraction
        self.cache_read, self.cache_read_dense = read * ratio, read
        # The newest token's are where they were computed.
        before = block * shape.visible_kv_bytes(workload.average_tokens - 1)
        self.cache_loaded = before * options.read_fraction * ratio
        self.cache_token = token * ratio
        self.states_token = shape.element_bytes * shape.hidden * block * shape.state_waits
        self.states_prefill = self.states_token * workload.prompt_tokens
        self.prefill_tokens = block * workload.prompt_tokens

    def bytes_loaded(self, tokens: float, fraction: float) -> float:
        """Bytes of weights that one pass moves, in this fraction of the dense ones: of experts, those routed to."""
        shape = self.shape
        inside = sum(n * self.layer_bytes(layer, tokens, fraction) for layer, n in shape.kinds)
        outside = (
            shape.element_bytes * (shape.embedding + shape.head) if self.machine.schedule.offloads_embeddings else 0
        )
        return inside + outside

    def weight_bytes(self, tokens: float) -> dict[str, Vector]:
        """Bytes of weights that one pass moves, by link."""
        options = self.options
        stored = self.bytes_loaded(tokens, options.stored_fraction)
        crossing = self.bytes_loaded(tokens, options.far_fraction(self.machine))
        return {
            "weights host to gpu": on(crossing, "weights.host", "weights.disk"),
            "weights disk to host": on(stored, "weights.disk"),
        }

    def layer_bytes(self, layer: LayerShape, tokens: float, fraction: float) -> float:
        """Bytes of a layer whose matrices have a fraction of theirs, with experts that so many tokens are routed to."""
        options, element_bytes = self.options, self.shape.element_bytes
        experts = layer.distinct_experts(tokens)
        vectors = layer.vectors + layer.expert_vectors * experts
        matrices = layer.shared + layer.expert * experts - vectors
        return bytes_of(matrices, options.weight_bits, element_bytes) * fraction + element_bytes * vectors

    def matmul_seconds(self, tokens: float, flops_per_s: float) -> float:
        """One batch through all layers: as fast as it multiplies, or as GPU memory gives its weights."""
        bandwidth, factor = self.machine.compute.gpu_memory_bytes_per_s, self.machine.compute.matmul_factor(tokens)
        total = 0.0
        for layer, number in self.shape.kinds:
            flops = 2 * layer.active_parameters * tokens
            read = self.shape.element_bytes * layer.read_parameters(tokens)  # they are unpacked by then
            product = max(flops / flops_per_s, read / bandwidth)
            total += number * factor * product
        return total

    def head_seconds(self, flops_per_s: float) -> float:
        """Logits of one token of each sequence of a batch, and the choice of a token."""
        head, compute = self.shape.head, self.machine.compute
        bandwidth = compute.head_bytes_per_s or compute.gpu_memory_bytes_per_s
        batch = self.options.batch_size
        product = max(2 * head * batch / flops_per_s, self.shape.element_bytes * head / bandwidth)
        logits = self.machine.schedule.per_logit_s * self.shape.vocabulary * batch
        return compute.matmul_factor(batch) * product + logits

    @property
    def attended_on_gpu(self) -> float:
        """Seconds of decode's attention over the whole cache where matrices multiply."""
        return self.cache_read_dense / self.machine.compute.gpu_attention_bytes_per_s

    def weights_to_gpu(self, moved: Vector) -> Vector:
        """Seconds of copying weights; packed ones are expanded from where they lie, which is counted there."""
        links = self.machine.links
        return moved * (0.0 if links.one_memory else 1 / links.host_to_gpu_bytes_per_s)

    def unpack_seconds(self, tokens: float) -> float:
        """Dequantising and expanding the weights of all layers, once for the block's tokens."""
        options, compute = self.options, self.machine.compute
        dense = self.shape.element_bytes * sum(n * layer.read_parameters(tokens) for layer, n in self.shape.kinds)
        seconds = dense / compute.dequantise_bytes_per_s if options.weight_bits != 16 else 0.0
        if options.stored_fraction < 1:
            if compute.expand_bytes_per_s is None:
                raise PlanError(
                    "a machine must have compute.expand_bytes_per_s to plan with compressed weights, as this model's "
                    "are: measure it (--hardware measure), add the key to its profile, or plan the dense checkpoint"
                )
            seconds += dense / compute.expand_bytes_per_s
        return seconds

    def overhead_seconds(self, tokens: float) -> float:
        """Serial work of all layers and batches, and what is done to the states of so many tokens beside matrices."""
        schedule = self.machine.schedule
        routed = sum(number for layer, number in self.shape.kinds if layer.experts)
        batches = self.options.num_batches
        states = tokens * self.shape.hidden * len(self.shape.layers)
        serial = len(self.shape.layers) * schedule.per_layer_s + routed * schedule.per_routing_s
        return batches * (serial + schedule.per_pass_s) + states * schedule.per_state_s

    @property
    def engine_seconds(self) -> float:
        """Seconds of a step's visits of engines, which have the KV cache where a policy chooses what is read of it."""
        visits = self.options.block_size * len(self.shape.layers) * (self.options.read_fraction < 1)
        return visits * self.machine.schedule.per_engine_visit_s

    @property
    def states_requested(self) -> Vector:
        """Seconds of the requests of hidden states on disk beside their bytes: a write and a read of each batch at each
        layer. The drive does other work meanwhile.
        """
        visits = 2 * self.shape.state_waits * self.options.num_batches
        return on(visits * self.machine.disk.request_s if self.machine.disk else 0.0, "activations.disk")


def _prefill_bytes(sizes: _Sizes) -> dict[str, Vector]:
    states, cache = sizes.states_prefill, sizes.cache_prefill
    return {
        **sizes.weight_bytes(sizes.prefill_tokens),
        "activations host to gpu": on(states, "activations.host", "activations.disk"),
        "activations disk to host": on(states, "activations.disk"),
        "activations gpu to host": on(states, "activations.host", "activations.disk"),
        "activations host to disk": on(states, "activations.disk"),
        "cache gpu to host": on(cache, "cache.host", "cache.disk"),
        "cache host to disk": on(cache, "cache.disk"),
        "cache host to device": on(cache, "cache.device"),
    }


def _decode_bytes(sizes: _Sizes) -> dict[str, Vector]:
    options, shape = sizes.options, sizes.shape
    states = sizes.states_token
    # Attention on the host takes queries there and results back; a drive that attends takes them over its link.
    queries = shape.element_bytes * shape.heads * shape.head_dim * options.block_size * shape.visible_tokens(1)
    read, new = sizes.cache_loaded, sizes.cache_token
    afar = ("cache.host", "cache.disk")
    to_gpu = on(queries, *afar) if options.cpu_attention else on(read, *afar)
    to_host = on(queries + new, *afar) if options.cpu_attention else on(new, *afar)
    return {
        **sizes.weight_bytes(options.block_size),
        "activations host to gpu": on(states, "activations.host", "activations.disk"),
        "activations disk to host": on(states, "activations.disk"),
        "activations gpu to host": on(states, "activations.host", "activations.disk"),
        "activations host to disk": on(states, "activations.disk"),
        "cache host to gpu": to_gpu + on(queries, "cache.device"),
        "cache disk to host": on(read, "cache.disk"),
        "cache gpu to host": to_host + on(queries + new, "cache.device"),
        "cache host to disk": on(new, "cache.disk"),
        "cache host to device": on(queries + new, "cache.device"),
        "cache device to host": on(queries, "cache.device"),
    }


def _prefill_seconds(sizes: _Sizes, moved: Mapping[str, Vector]) -> dict[str, Vector]:
    machine, shape, options = sizes.machine, sizes.shape, sizes.options
    compute, links = machine.compute, machine.links
    tokens = options.batch_size * sizes.workload.prompt_tokens
    seen = shape.visible_tokens(sizes.workload.prompt_tokens)
    scores = 4 * sizes.prefill_tokens * seen * shape.heads * shape.head_dim
    gpu = options.num_batches * (
        sizes.matmul_seconds(tokens, compute.matmul_prefill_flops_per_s)
        + sizes.head_seconds(compute.matmul_prefill_flops_per_s)
    )
    gpu += scores / compute.attention_prefill_flops_per_s + sizes.overhead_seconds(sizes.prefill_tokens)
    gpu += options.num_batches * machine.schedule.per_start_s
    packed = 0.0
    if options.cache_bits != 16:
        packed = sizes.cache_prefill_dense / (compute.pack_cache_bytes_per_s or compute.dequantise_bytes_per_s)
    seconds = {
        "gpu": on(gpu),
        "weights unpacked": on(sizes.unpack_seconds(sizes.prefill_tokens)),
        "cache packed": on(packed),
        "weights to gpu": sizes.weights_to_gpu(moved["weights host to gpu"]),
        "activations to gpu": moved["activations host to gpu"] / links.host_to_gpu_bytes_per_s,
        "activations to host": moved["activations gpu to host"] / links.gpu_to_host_bytes_per_s,
        "cache to host": on(sizes.cache_prefill / links.gpu_to_host_cache_bytes_per_s, "cache.host"),
    }
    if machine.disk is not None:
        disk = machine.disk
        seconds |= {
            "weights from disk": moved["weights disk to host"] / disk.read_weights_bytes_per_s,
            "activations from disk": moved["activations disk to host"] / disk.read_weights_bytes_per_s,
            "activations to disk": moved["activations host to disk"] / disk.write_back_bytes_per_s,
            "activations requested": sizes.states_requested,
            "cache to page cache": moved["cache host to disk"] / disk.write_cache_bytes_per_s,
            "cache to disk": moved["cache host to disk"] / disk.write_back_bytes_per_s,
        }
    return seconds | _device_seconds(sizes, moved["cache host to device"], 0.0)


def _decode_seconds(sizes: _Sizes, moved: Mapping[str, Vector]) -> dict[str, Vector]:
    machine, options = sizes.machine, sizes.options
    compute, links = machine.compute, machine.links
    batches = options.num_batches * (
        sizes.matmul_seconds(options.batch_size, compute.matmul_decode_flops_per_s)
        + sizes.head_seconds(compute.matmul_decode_flops_per_s)
    )
    gpu = on(batches + sizes.overhead_seconds(options.block_size) + sizes.engine_seconds)
    # 4-bit codes are unpacked first, wherever they are attended to.
    unpacked = 0.0
    if options.cache_bits != 16:
        unpacked = sizes.cache_read_dense / (compute.unpack_cache_bytes_per_s or compute.dequantise_bytes_per_s)
    dense = sizes.cache_read_dense
    afar = () if options.cpu_attention else ("cache.host", "cache.disk")
    gpu = gpu + on(sizes.attended_on_gpu, "cache.gpu", *afar)
    host = on(0)
    if options.cpu_attention:
        host = on(dense / compute.host_attention_bytes_per_s, "cache.host")
        host = host + on(dense / compute.host_buffer_attention_bytes_per_s, "cache.disk")
        host = host + on(dense / compute.host_attention_bytes_per_s * (options.cache_bits != 16), *_AFAR)
    seconds = {
        "gpu": gpu,
        "host": host,
        "weights unpacked": on(sizes.unpack_seconds(options.block_size)),
        "cache unpacked": on(unpacked, "cache.gpu", *_AFAR),
        "weights to gpu": sizes.weights_to_gpu(moved["weights host to gpu"]),
        "activations to gpu": moved["activations host to gpu"] / links.host_to_gpu_bytes_per_s,
        "activations to host": moved["activations gpu to host"] / links.gpu_to_host_bytes_per_s,
        "cache to gpu": moved["cache host to gpu"] / links.host_to_gpu_bytes_per_s,
        "cache to host": moved["cache gpu to host"] / links.gpu_to_host_bytes_per_s,
    }
    if machine.disk is not None:
        disk = machine.disk
        seconds |= {
            "weights from disk": moved["weights disk to host"] / disk.read_weights_bytes_per_s,
            "activations from disk": moved["activations disk to host"] / disk.read_weights_bytes_per_s,
            "activations to disk": moved["activations host to disk"] / disk.write_tokens_bytes_per_s,
            "activations requested": sizes.states_requested,
            "cache from disk": moved["cache disk to host"] / disk.read_cache_bytes_per_s,
            "cache to disk": moved["cache host to disk"] / disk.write_tokens_bytes_per_s,
        }
    link = moved["cache host to device"] + moved["cache device to host"]
    return seconds | _device_seconds(sizes, link, sizes.cache_read)


_AFAR = ("cache.host", "cache.disk")


def _device_seconds(sizes: _Sizes, link: Vector, read: float) -> dict[str, Vector]:
    device = sizes.machine.device
    if device is None:
        return {}
    written = sizes.cache_token if read else sizes.cache_prefill
    fraction = min(1.0, device.read_fraction / sizes.options.read_fraction)  # of what the policy reads already
    busy = read * fraction / device.attend_bytes_per_s + written / device.write_bytes_per_s
    return {"device": on(busy, "cache.device"), "device link": link / device.link_bytes_per_s}
