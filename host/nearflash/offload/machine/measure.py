"""This machine as the planner sees it, measured in a few seconds: copies, matrix products, attention, the drive."""

import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, LlamaModel

from nearflash.abi.errors import PlanError
from nearflash.offload.cache.groups import decode, encode
from nearflash.offload.cache.host_attention import attend_halves
from nearflash.offload.machine.machine_file import FREE_SHARE, available_bytes
from nearflash.offload.machine.measure_layer import STEP_TOKENS, LayerRates, measure_layer, prefill_attention_rate
from nearflash.offload.machine.measure_runtime import tiny_decoder, visit_seconds
from nearflash.offload.machine.stopwatch import finish, seconds_of, times_per_second
from nearflash.planning.policy import VISITS_AHEAD
from nearflash.planning.profile import Compute, Disk, DiskRate, Links, Machine, MemorySizes, RuntimeCosts
from nearflash.planning.shapes import ModelShape
from nearflash.storage.io.backend import BLOCK_BYTES
from nearflash.storage.io.bandwidth import Probe
from nearflash.storage.io.measure import Rate, measure_drive
from nearflash.storage.io.profile import find_profile
from nearflash.weights.checkpoint import INDEX, SINGLE, open_checkpoint
from nearflash.weights.compress import compress_tensor
from nearflash.weights.crossing import check_stored, crosses_as_stored, expand_far
from nearflash.weights.expand import expand
from nearflash.weights.file import PackedTensor, WeightsTensor, read_file, write_file
from nearflash.weights.weights_map import TORCH_DTYPES, KeptTensor

__all__ = ["measure_machine"]

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_COPY_BYTES = 128 << 20
_SIDE = 1024
_MANY_TOKENS = 4096
"""Of prefill: more than the caches hold."""
_FEW_TOKENS = 16
"""Of a step of decode that is not bound by memory alone."""
_MATRICES = 32
"""More than the caches hold."""
_HEADS, _HEAD_DIM = 16, 64
_SEQUENCES, _CONTEXT, _CACHE_BYTES = 16, 512, 256 << 20
"""Of a batch that attends, over more keys and values than the caches hold."""
_BESIDE_BYTES, _BESIDE_S, _BESIDE_TIMES = 64 << 20, 0.2, 5
"""What is moved at a time beside computing, and for how long, how often."""
_VOCABULARY = 32768
_HEAD_BYTES, _HEADS_BYTES = 64 << 20, 192 << 20
"""Of an output layer at most, and of as many as the caches do not hold, as a step's layers push it out of them."""
_EXPANDED_BYTES = 64 << 20
"""Dense bytes of what is expanded at least, where the checkpoint has as many: more than the caches hold."""
_REQUESTS = 256
"""Of one block each, one at a time."""
_HOST_GPU_SHARE = 0.25
"""Of free memory that computes on a machine without a GPU, unless a budget is given."""


def measure_machine(
    folder: Path, dtype_name: str | None = None, model: tuple[Path, ModelShape] | None = None
) -> Machine:
    """Measure where `folder` lies; rates of its drive that `nearflash devices --measure` kept are used again.

    model: the one to plan for, whose layers are timed; without it, or where they are too large, square matrices are.
    dtype_name: what the model computes in, as its config has it (float16, bfloat16, float32); None: fp16 on a GPU, fp32
    elsewhere. Raises StateError for a folder that cannot be measured, PlanError for another dtype.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype_name = dtype_name or ("float16" if device.type == "cuda" else "float32")
    if dtype_name not in _DTYPES:
        raise PlanError(f"dtype must be one of {', '.join(_DTYPES)}, not {dtype_name!r}")
    dtype = _DTYPES[dtype_name]
    memory = _memory(device, folder)
    to_gpu, to_host = _copies(device)
    rates = [*_disk_rates(folder)]
    visit = visit_seconds(device, dtype, folder)
    with torch.inference_mode():
        shape = None if model is None else model[1]
        heads = (shape.heads, shape.kv_heads, shape.head_dim) if shape else (_HEADS, _HEADS, _HEAD_DIM)
        of_prompts = prefill_attention_rate(heads, device, dtype)
        layer_rates = None if model is None else measure_layer(*model, device, dtype, of_prompts)
        products = layer_rates or _square_rates(device, dtype)
        what = "layers of the model" if layer_rates else f"matrices of {_SIDE} x {_SIDE}"
        loops = device.type == "cuda" and dtype == torch.float16  # of attention on the host beside a GPU
        on_host, in_buffers = (
            _attention_bytes(torch.device("cpu"), dtype, heads, by_token=by_token, loops=loops)
            for by_token in (False, True)
        )
        compute = Compute(
            source=f"measured on {device}: {what} in {dtype}",
            matmul_prefill_flops_per_s=products.flops_per_s,
            matmul_decode_flops_per_s=products.flops_per_s,
            attention_prefill_flops_per_s=of_prompts,
            gpu_attention_bytes_per_s=on_host if device.type == "cpu" else _attention_bytes(device, dtype, heads),
            gpu_memory_bytes_per_s=products.bytes_per_s,
            host_attention_bytes_per_s=on_host,
            host_buffer_attention_bytes_per_s=in_buffers,
            **_unpack_rates(None if model is None else model[0], device, dtype),
            head_bytes_per_s=None if shape is None else _head_bytes(device, dtype, shape),
            matmul_tokens=products.tokens,
            matmul_factors=products.factors,
        )
        to_reads, from_reads, to_copies = _measure_losses(device, dtype, folder)
        schedule = RuntimeCosts(
            source="measured: the runtime, a layer beside its matrices; matrix products, disk reads and copies beside "
                   "each other",
            per_layer_s=max(0.0, visit.layer - _layer_seconds(device, dtype)) if layer_rates else visit.layer,
            per_pass_s=visit.one_pass,
            per_start_s=visit.start,
            per_engine_visit_s=visit.engine,
            per_state_s=0.0 if layer_rates else _state_seconds(device, dtype),
            per_logit_s=_logit_seconds(device, dtype),
            computing_lost_to_reads=to_reads,
            computing_lost_to_copies=to_copies,
            reads_lost_to_computing=from_reads,
            visits_ahead=VISITS_AHEAD,
        )  # fmt: skip
    if find_profile(folder) is None:
        rates += _large_reads(folder)  # again: a drive of others is not as fast at any time
    links = Links("measured copies of 128 MiB, pinned where there is a GPU", to_gpu, to_host, to_host,
                  one_memory=device.type == "cpu")  # fmt: skip
    disk = _disk(rates, _request_seconds(folder))
    return Machine("this machine", memory, links, disk, compute, schedule, rates=tuple(rates))


def _memory(device: torch.device, folder: Path) -> MemorySizes:
    free = available_bytes() * FREE_SHARE
    if device.type == "cuda":
        gpu = torch.cuda.mem_get_info()[0] * FREE_SHARE
    else:
        gpu = free * _HOST_GPU_SHARE
        free -= gpu
    free_disk = shutil.disk_usage(folder).free * FREE_SHARE
    return MemorySizes(f"{FREE_SHARE:.0%} of what is free now", gpu, free, free_disk)


def _copies(device: torch.device) -> tuple[float, float]:
    """Bytes a second from host to GPU and back; without a GPU, of a copy in memory."""
    pinned = device.type == "cuda"
    host = torch.ones(_COPY_BYTES, dtype=torch.uint8, pin_memory=pinned)
    there = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    into = seconds_of(device, lambda: there.copy_(host, non_blocking=True))
    back = seconds_of(device, lambda: host.copy_(there, non_blocking=True))
    return _COPY_BYTES / into, _COPY_BYTES / back


def _square_rates(device: torch.device, dtype: torch.dtype) -> LayerRates:
    """Rates of square matrices, too many for the caches, where the model's own layer is not known or too large."""
    weights = [torch.randn(_SIDE, _SIDE, dtype=dtype, device=device) for _ in range(_MATRICES)]

    def seconds(tokens: int, used: list[torch.Tensor]) -> float:
        states = torch.randn(tokens, _SIDE, dtype=dtype, device=device)
        return seconds_of(device, lambda: [states @ weight.T for weight in used]) / len(used)

    steps = [seconds(tokens, weights) for tokens in STEP_TOKENS]
    return LayerRates.of(_SIDE * _SIDE, weights[0].nbytes, steps, _MANY_TOKENS, seconds(_MANY_TOKENS, weights[:1]))


def _attention_bytes(
    device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int], *, by_token: bool = False,
    loops: bool = False,
) -> float:  # fmt: skip
    """Bytes of KV that decode attends over in a second; `heads` of queries, of keys and values, and their dimension.

    by_token: rows of a token lie together, as in buffers (kv_storage), not those of a head. loops: by compiled loops of
    fp16, not by torch.
    """
    queries, keys, dim = heads
    visit_bytes = 2 * _SEQUENCES * keys * _CONTEXT * dim * dtype.itemsize
    count, shape = max(1, _CACHE_BYTES // visit_bytes), (2, _SEQUENCES, keys, _CONTEXT, dim)
    visits = [torch.randn(shape, dtype=dtype, device=device) for _ in range(count)]
    if by_token:
        visits = [cache.permute(3, 0, 1, 2, 4).contiguous().permute(1, 2, 3, 0, 4) for cache in visits]
    query = torch.randn(_SEQUENCES, queries, 1, dim, dtype=dtype, device=device)

    def attend(cache: torch.Tensor) -> None:
        torch.nn.functional.scaled_dot_product_attention(query, cache[0], cache[1], enable_gqa=queries != keys)

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        visit = partial(attend_halves, threads, query, counts=[_CONTEXT] * _SEQUENCES) if loops else attend
        return len(visits) * visit_bytes / seconds_of(device, lambda: [visit(cache) for cache in visits])


def _head_bytes(device: torch.device, dtype: torch.dtype, shape: ModelShape) -> float:
    """Bytes of an output layer's weights that a product of one token reads in a second."""
    rows = max(1, min(shape.vocabulary, _HEAD_BYTES // (shape.hidden * dtype.itemsize)))
    size = rows * shape.hidden * dtype.itemsize
    heads = [torch.ones(rows, shape.hidden, dtype=dtype, device=device) for _ in range(-(-_HEADS_BYTES // size))]
    states = torch.ones(1, shape.hidden, dtype=dtype, device=device)
    return len(heads) * size / seconds_of(device, lambda: [states @ head.T for head in heads])


def _unpack_rates(model: Path | None, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Dense bytes a second of weights in 4 bits, of the model's own where they are compressed (else of a matrix whose
    half is zero), and of K and V that become 4 bits and come out of them; each where the runtime does it.
    """
    bits = torch.randn(_SIDE, _SIDE).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    groups = _keep(compress_tensor("w", bits, "groups", 4))
    bitmap = _keep(compress_tensor("w", np.where(bits & 1, bits, 0).astype(bits.dtype), "bitmap"))
    states = torch.randn(1, _SIDE * _SIDE // _HEAD_DIM, _HEAD_DIM, device=device).to(dtype)
    codes, far = encode(states), device.type != "cpu"
    own = _find_compressed(model) if model is not None and model.is_dir() else []
    return {
        "dequantise_bytes_per_s": _expand_rate(device, [groups], far=far),
        "expand_bytes_per_s": _expand_rate(device, own or [bitmap], far=far),
        "pack_cache_bytes_per_s": states.nbytes / seconds_of(device, lambda: encode(states)),
        "unpack_cache_bytes_per_s": states.nbytes / seconds_of(device, lambda: decode(codes, torch.empty_like(states))),
    }


def _keep(packed: PackedTensor) -> KeptTensor:
    """A tensor that was packed, as one of a file that was read."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / SINGLE
        write_file(file, {packed.name: (packed.dtype, packed.shape)}, [packed])
        return KeptTensor(read_file(file)[packed.name])


def _expand_rate(device: torch.device, tensors: Sequence[KeptTensor], *, far: bool) -> float:
    """Dense bytes a second of compressed tensors. far: by the device, of what crosses to it as it is stored; else by
    the host.
    """
    work: list[Callable[[], Any]] = []
    for tensor in tensors:
        is_far = far and crosses_as_stored(tensor)
        out = torch.empty(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype], device=device if is_far else "cpu")
        if is_far:
            checked = check_stored(tensor, tensor.read())
            data, table = (torch.tensor(part, device=device) for part in (tensor.read(), checked.table))
            work.append(partial(expand_far, checked, data, table, out))
        else:
            work.append(partial(expand, tensor, out=out))
    seconds = seconds_of(device, lambda: [each() for each in work])
    return sum(tensor.dense_bytes for tensor in tensors) / seconds


def _find_compressed(folder: Path) -> list[KeptTensor]:
    """The compressed tensors of a checkpoint's first layers that have any, in memory, of _EXPANDED_BYTES at least; none
    where nothing is compressed.

    All of a layer: small ones take longer by the byte than the largest.
    """
    if not any((folder / name).is_file() for name in (SINGLE, INDEX)):
        return []
    layers: dict[str, list[WeightsTensor]] = {}
    for name, tensor in open_checkpoint(folder).items():
        if tensor.form != "dense":
            number = re.search(r"\.\d+\.", name)
            layers.setdefault(number[0] if number else "", []).append(tensor)
    found = list[KeptTensor]()
    for tensors in layers.values():
        if sum(tensor.dense_bytes for tensor in found) < _EXPANDED_BYTES:
            found += map(KeptTensor, tensors)
    return found


def _measure_losses(device: torch.device, dtype: torch.dtype, folder: Path) -> tuple[float, float, float]:
    """RuntimeCosts' computing_lost_to_reads, reads_lost_to_computing, computing_lost_to_copies."""
    weights = [torch.randn(_SIDE, _SIDE, dtype=dtype, device=device) for _ in range(8)]
    states = torch.randn(_FEW_TOKENS, _SIDE, dtype=dtype, device=device)
    with torch.inference_mode(False):  # another thread copies
        there, here = (torch.ones(_BESIDE_BYTES, dtype=torch.uint8) for _ in range(2))

    def compute() -> None:
        for weight in weights:
            states @ weight.T
        finish(device)

    def measure_loss(move: Callable[[], Any]) -> tuple[float, float]:
        losses = []
        for _ in range(_BESIDE_TIMES):
            alone, moving = times_per_second(compute, _BESIDE_S), times_per_second(move, _BESIDE_S)
            stop, moved = Event(), [0]
            thread = Thread(target=_repeat, args=(move, stop, moved))
            thread.start()
            try:
                start = time.perf_counter()
                beside = times_per_second(compute, _BESIDE_S) / alone
            finally:
                stop.set()
                thread.join()
            rate = moved[0] / (time.perf_counter() - start) / moving
            losses.append(_shares(beside, rate))
        first, second = map(fmean, zip(*losses, strict=True))  # what is lost now and then is lost, too
        return first, second

    with Probe(folder, 4 * _BESIDE_BYTES) as probe:
        probe.write(probe.size_bytes)
        reads = measure_loss(lambda: probe.read(_BESIDE_BYTES))
    return *reads, measure_loss(lambda: there.copy_(here))[0]


def _shares(computing: float, moving: float) -> tuple[float, float]:
    """Shares of the other's time that each loses, of what is left of both rates beside each other.

    A second beside each other does `computing` seconds of what is computed alone, and `moving` of what is moved alone:
    computing + lost_to_moving * moving = 1, and the other way round.
    """
    lost = (1 - computing) / max(moving, 1e-3), (1 - moving) / max(computing, 1e-3)
    return min(1.0, max(0.0, lost[0])), min(1.0, max(0.0, lost[1]))


def _repeat(work: Callable[[], Any], stop: Event, times: list[int]) -> None:
    while not stop.is_set():
        work()
        times[0] += 1


def _layer_seconds(device: torch.device, dtype: torch.dtype) -> float:
    """Seconds of what a layer does beside its matrices, whatever their size: a decoder of tiny ones, a token."""
    seconds = []
    for layers in (1, 9):
        config = tiny_decoder(layers)
        model = LlamaModel(config).to(device, dtype).eval()
        token = torch.zeros(1, 1, dtype=torch.long, device=device)
        seconds.append(seconds_of(device, lambda: model(token, past_key_values=DynamicCache(config=config))))  # noqa: B023
    return max(0.0, (seconds[1] - seconds[0]) / 8)


def _logit_seconds(device: torch.device, dtype: torch.dtype) -> float:
    """Seconds a logit of choosing the most likely token, in fp32 as transformers does."""
    logits = torch.randn(16, _VOCABULARY, dtype=dtype, device=device)
    return seconds_of(device, lambda: logits.to(torch.float32, copy=True).argmax(-1)) / logits.numel()


def _state_seconds(device: torch.device, dtype: torch.dtype) -> float:
    """Seconds for each element of many tokens' states: norms in fp32, rotation, a gated activation, residuals.

    The activation is 8/3 as wide as the states, as in most decoders.
    """
    states = torch.randn(_MANY_TOKENS, _SIDE, dtype=dtype, device=device)
    gate, up = (torch.randn(_MANY_TOKENS, 8 * _SIDE // 3, dtype=dtype, device=device) for _ in range(2))
    scale, half = states[:1], _HEAD_DIM // 2

    def norm(values: torch.Tensor) -> torch.Tensor:
        wide = values.float()
        return scale * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype)

    def rotate(values: torch.Tensor) -> torch.Tensor:
        heads = values.view(_MANY_TOKENS, _SIDE // _HEAD_DIM, _HEAD_DIM).transpose(0, 1)
        turned = torch.cat((-heads[..., half:], heads[..., :half]), -1)
        return (heads * 0.5 + turned * 0.5).transpose(0, 1).reshape(_MANY_TOKENS, _SIDE)

    def work() -> None:
        summed = states + rotate(norm(states))
        summed = summed + norm(summed)
        torch.nn.functional.silu(gate) * up

    return seconds_of(device, work, repeats=5) / states.numel()


def _disk_rates(folder: Path) -> Iterator[DiskRate]:
    """Direct reads and writes as they were kept, or short measurements; buffered ones are measured."""
    kept = find_profile(folder)
    if kept is not None:
        yield from (_rate(rate, True) for rate in kept.rates if rate.call in ("read", "write"))
        return
    small = {"blocks": (1 << 20, 4 << 20), "depths": (1, 4), "file_bytes": 64 << 20}
    for direct in (True, False):
        for rate in measure_drive(folder, direct=direct, repeats=3, **small):  # type: ignore[arg-type]
            yield _rate(rate, direct)
    yield from _large_reads(folder)


def _large_reads(folder: Path) -> Iterator[DiskRate]:
    """Requests whose memory no processor's cache holds, as that of layers; small ones are faster on a virtual drive."""
    for rate in measure_drive(folder, blocks=(16 << 20,), depths=(2,), file_bytes=256 << 20, repeats=3):
        if rate.call == "read":
            yield _rate(rate, True)


def _rate(rate: Rate, direct: bool) -> DiskRate:
    return DiskRate(rate.call, direct, rate.block_bytes, rate.depth, rate.median * 1e9)


def _disk(rates: Sequence[DiskRate], request_s: float) -> Disk:
    """Rates of the drive by direct I/O, as buffered reads of a file just written come from memory."""
    reads, writes = ([rate for rate in rates if rate.call == call and rate.direct] for call in ("read", "write"))
    largest = max(rate.request_bytes for rate in reads)
    deepest = max(rate.depth for rate in reads if rate.request_bytes == largest)
    read = fmean(r.bytes_per_s for r in reads if (r.request_bytes, r.depth) == (largest, deepest))
    fastest, slowest = (choose(rate.bytes_per_s for rate in writes) for choose in (max, min))
    return Disk("measured by direct I/O: reads as the largest; writes as the fastest kind, small ones as the slowest",
                read, read, fastest, fastest, slowest, request_s, direct=True)  # fmt: skip


def _request_seconds(folder: Path) -> float:
    """Seconds of a direct write of one block and of its read, the mean of both: their bytes take next to nothing."""
    with Probe(folder, _REQUESTS * BLOCK_BYTES, block_bytes=BLOCK_BYTES, threads=1) as probe:
        return fmean((probe.write(probe.size_bytes), probe.read(probe.size_bytes))) / _REQUESTS
