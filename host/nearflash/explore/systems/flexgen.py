"""FlexGen, FlexGen with SparQ, and DeepSpeed ZeRO-Inference on InstInfer's host, by nearflash.planning's cost model.

FlexGen keeps weights on the GPU and KV on drives, through the host's file system: drive, host, GPU. What that path
gives is measured with one drive, a faster one, and no second drive widens it. What it reaches on a GPU is its authors'
T4 constants over the datasheet, scaled to the GPU at hand. Without overlap, as the paper's breakdown. A batch is
feasible where GPU memory holds the weights and prefill's tensors of one layer; ZeRO-Inference swaps where host memory
is full.

SparQ from a drive reads pages: FlexGen's cache has all heads of a token side by side (released code), so a page of 4 KB
holds 16 heads of one token, and is read if any of them chose it; the copy of K by channel has a token's row of one
channel in a page of its own.
"""

import math
from dataclasses import replace

from nearflash.abi.errors import PlanError
from nearflash.explore.links import Link
from nearflash.explore.outcome import Outcome
from nearflash.explore.processors import Gpu, Host, Runtime
from nearflash.explore.shapes import shape
from nearflash.explore.systems.instinfer import Serving
from nearflash.explore.tables import read_part
from nearflash.planning.cost import Prediction, predict
from nearflash.planning.policy import OffloadPolicy, Shares
from nearflash.planning.profile import Compute, Disk, Links, Machine, MemorySizes, RuntimeCosts
from nearflash.planning.terms import Workload

__all__ = ["flexgen", "flexgen_machine", "prefill_bytes", "sparq_page_fraction", "zero_inference"]

_PAGE_BYTES = 4096
_LARGE_BYTES = 1e15


def flexgen_machine(runtime: Runtime, gpu: Gpu, link: Link) -> Machine:
    """The planner's profile of a host. A drive's rate is such that with the link it gives what the runtime states."""
    read = 1 / (1 / runtime.read_bytes_per_s - 1 / link.bytes_per_s)
    decode = gpu.fp16_flops_per_s * runtime.decode_fraction
    attention = gpu.memory_bytes_per_s * runtime.attention_fraction
    return Machine(
        name="explore",
        memory=MemorySizes(runtime.source, gpu.memory_bytes, _LARGE_BYTES, _LARGE_BYTES),
        links=Links(link.source, link.bytes_per_s, link.bytes_per_s, link.bytes_per_s),
        disk=Disk(runtime.source, read, read, read, read, read),
        compute=Compute(
            source=gpu.source,
            matmul_prefill_flops_per_s=gpu.fp16_flops_per_s * runtime.prefill_fraction,
            matmul_decode_flops_per_s=decode,
            attention_prefill_flops_per_s=gpu.fp16_flops_per_s * runtime.prefill_fraction,
            gpu_attention_bytes_per_s=attention,
            gpu_memory_bytes_per_s=gpu.memory_bytes_per_s,
            host_attention_bytes_per_s=attention,
            host_buffer_attention_bytes_per_s=attention,
            dequantise_bytes_per_s=attention,
        ),
        schedule=RuntimeCosts(runtime.source, per_layer_s=runtime.layer_s),
    )


def sparq_page_fraction(serving: Serving, compression: int = 8) -> float:
    """Share of dense KV bytes in pages of FlexGen's cache that SparQ's rows touch."""
    dim = serving.shape.head_dim
    in_page = max(1, _PAGE_BYTES // (2 * dim))
    tokens = 1 - (1 - 1 / (2 * compression)) ** in_page
    row = 2 * serving.tokens
    pages = math.ceil(row / _PAGE_BYTES) * _PAGE_BYTES / row
    return tokens + 0.5 * pages / compression


def flexgen(serving: Serving, drives: int = 1, sparq: bool = False) -> Outcome:
    """An average decode step of the whole batch; sparq: reads and attends to an eighth of it, in whole pages.

    Raises PlanError for no drives.
    """
    if drives < 1:
        raise PlanError(f"drives must be 1 at least, not {drives}")
    runtime, part = read_part(Runtime, "flexgen"), read_part(Gpu, "a6000")
    machine = flexgen_machine(runtime, part, read_part(Link, "pcie4-x16"))
    policy = OffloadPolicy(serving.batch, 1, Shares(gpu=1), Shares(disk=1), Shares(gpu=1), overlap=False)
    prediction = predict(shape(serving.model), machine, Workload(serving.prompt, serving.new), policy)
    steps = serving.new - 1
    parts = prediction.breakdown("decode")
    read = sparq_page_fraction(serving) if sparq else 1.0
    attention = serving.kv_bytes / machine.compute.gpu_attention_bytes_per_s
    used = 0.125 if sparq else 1.0
    phases = {
        "KV read": parts["cache_read"] / steps * read,
        "KV write": parts["cache_write"] / steps,
        "weights": parts["weight_read"] / steps,
        "GPU": parts["compute"] / steps - attention * (1 - used),
    }
    found = _outcome(f"FlexGen{' SparQ' if sparq else ''}, {drives} SSD", serving, phases, prediction, drives)
    held = 2 * serving.shape.parameters + prefill_bytes(serving)
    return replace(
        found, memory_bytes=dict(found.memory_bytes) | {"GPU": held}, capacity_bytes={"GPU": part.memory_bytes}
    )


def prefill_bytes(serving: Serving) -> float:
    """Bytes that FlexGen's prefill has on the GPU of one layer for the whole batch, in fp16.

    Hidden states before and after; Q, K, V; K and V of the layer before, on their way out; scores and their softmax.
    """
    model, rows = serving.shape, 2 * serving.batch * serving.prompt
    width = model.heads * model.head_dim
    return rows * (2 * model.hidden + width + 4 * model.kv_heads * model.head_dim + 2 * model.heads * serving.prompt)


def zero_inference(serving: Serving) -> Outcome:
    """An average decode step of ZeRO-Inference: weights and KV come from host memory for every layer."""
    runtime, part = read_part(Runtime, "deepspeed-inference"), read_part(Gpu, "a6000")
    machine = flexgen_machine(runtime, part, read_part(Link, "pcie4-x16"))
    pageable = read_part(Link, "pcie4-x16-pageable")
    rate = pageable.bytes_per_s
    machine = Machine(machine.name, machine.memory, Links(pageable.source, rate, rate, rate), machine.disk,
                      machine.compute, machine.schedule)  # fmt: skip
    policy = OffloadPolicy(serving.batch, 1, Shares(host=1), Shares(host=1), Shares(gpu=1), overlap=False)
    prediction = predict(shape(serving.model), machine, Workload(serving.prompt, serving.new), policy)
    steps = serving.new - 1
    parts = prediction.breakdown("decode")
    names = {"cache_read": "KV read", "cache_write": "KV write", "weight_read": "weights", "compute": "GPU"}
    used = 2 * serving.shape.parameters + serving.kv_bytes
    phases = {names[key]: value / steps for key, value in parts.items()}
    phases["swap"] = read_part(Host, "instinfer").swap_seconds(used)
    return _outcome(f"DeepSpeed, batch {serving.batch}", serving, phases, prediction)


def _outcome(name: str, serving: Serving, phases: dict[str, float], found: Prediction, drives: int = 1) -> Outcome:
    held = 2 * serving.shape.kv * serving.batch * (serving.prompt + serving.new)
    return Outcome(
        system=name,
        model=serving.model,
        phases=phases,
        units=serving.batch,
        memory_bytes={"KV": held, "weights": 2 * serving.shape.parameters},
        parts={"a6000": 1, "host": 1, "ssd": drives},
        traffic_bytes={key: value * serving.batch for key, value in found.bytes_per_token.items()},
        assumptions=("no overlap of loading and computing", "KV passes the host: a second drive gives nothing"),
    )
