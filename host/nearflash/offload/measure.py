"""This machine as the planner sees it, measured in a few seconds: copies, matrix products, attention, the drive."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from nearflash.abi.errors import PlanError
from nearflash.offload.machine_file import FREE_SHARE, available_bytes
from nearflash.planning.profile import Compute, Disk, DiskRate, Links, Machine, Memory, Schedule
from nearflash.storage.io.measure import Rate, measure_drive
from nearflash.storage.io.profile import known_profile

__all__ = ["measure_machine"]

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_COPY_BYTES = 128 << 20
_SIDE = 1024
_TOKENS, _FEW_TOKENS, _MANY_TOKENS = 512, 16, 4096
"""Of prefill, of a step of decode that is not bound by memory alone, and more than the caches hold."""
_HEADS, _HEAD_DIM = 16, 64
_CONTEXT = 4096
_HOST_GPU_SHARE = 0.25
"""Of free memory that computes on a machine without a GPU, unless a budget is given."""


def measure_machine(folder: Path, dtype_name: str | None = None) -> Machine:
    """Measure where `folder` lies; rates of its drive that `nearflash devices --measure` kept are used again.

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
    rates = tuple(_disk_rates(folder))
    with torch.inference_mode():
        prefill, decode = (_matmul_flops(device, dtype, tokens) for tokens in (_TOKENS, _FEW_TOKENS))
        compute = Compute(
            source=f"measured on {device}, matrices of {_SIDE} x {_SIDE} in {dtype}",
            matmul_prefill_flops_per_s=prefill,
            matmul_decode_flops_per_s=decode,
            attention_prefill_flops_per_s=prefill,
            gpu_attention_bytes_per_s=_attention_bytes(device, dtype),
            gpu_memory_bytes_per_s=_weight_bytes(device, dtype),
            host_attention_bytes_per_s=_attention_bytes(torch.device("cpu"), dtype),
            host_buffer_attention_bytes_per_s=_attention_bytes(torch.device("cpu"), dtype),
            dequantise_bytes_per_s=_dequantise_bytes(device, dtype),
            expand_bytes_per_s=_expand_bytes(device, dtype),
        )
        schedule = Schedule(source="measured: a layer's operations beside its matrices, of one token and of many",
                            per_layer_s=_small_operations(device, dtype),
                            per_state_s=_state_seconds(device, dtype))  # fmt: skip
    links = Links("measured copies of 128 MiB, pinned where there is a GPU", to_gpu, to_host, to_host)
    return Machine("this machine", memory, links, _disk(rates), compute, schedule, rates=rates)


def _memory(device: torch.device, folder: Path) -> Memory:
    free = available_bytes() * FREE_SHARE
    if device.type == "cuda":
        gpu = torch.cuda.mem_get_info()[0] * FREE_SHARE
    else:
        gpu = free * _HOST_GPU_SHARE
        free -= gpu
    room = shutil.disk_usage(folder).free * FREE_SHARE
    return Memory(f"{FREE_SHARE:.0%} of what is free now", gpu, free, room)


@contextmanager
def _timed(device: torch.device) -> Iterator[Callable[[], float]]:
    _wait(device)
    start = time.perf_counter()
    yield lambda: time.perf_counter() - start


def _seconds(device: torch.device, work: Callable[[], Any], repeats: int = 10) -> float:
    """The fastest of some repeats, after one that warms up: others that compute meanwhile only make it slower."""
    work()
    found = []
    for _ in range(repeats):
        with _timed(device) as elapsed:
            work()
            _wait(device)
            found.append(elapsed())
    return min(found)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _copies(device: torch.device) -> tuple[float, float]:
    """Bytes a second from host to GPU and back; without a GPU, of a copy in memory."""
    pinned = device.type == "cuda"
    host = torch.ones(_COPY_BYTES, dtype=torch.uint8, pin_memory=pinned)
    there = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    into = _seconds(device, lambda: there.copy_(host, non_blocking=True))
    back = _seconds(device, lambda: host.copy_(there, non_blocking=True))
    return _COPY_BYTES / into, _COPY_BYTES / back


def _matmul_flops(device: torch.device, dtype: torch.dtype, tokens: int) -> float:
    weight = torch.randn(_SIDE, _SIDE, dtype=dtype, device=device)
    states = torch.randn(tokens, _SIDE, dtype=dtype, device=device)
    return 2 * tokens * _SIDE * _SIDE / _seconds(device, lambda: states @ weight.T)


def _weight_bytes(device: torch.device, dtype: torch.dtype) -> float:
    """Bytes of weights a second, as one token multiplies with matrices too many for the caches."""
    weights = [torch.randn(_SIDE, _SIDE, dtype=dtype, device=device) for _ in range(32)]
    states = torch.randn(1, _SIDE, dtype=dtype, device=device)
    seconds = _seconds(device, lambda: [states @ weight.T for weight in weights])
    return dtype.itemsize * len(weights) * _SIDE * _SIDE / seconds


def _attention_bytes(device: torch.device, dtype: torch.dtype) -> float:
    """Bytes of KV that decode attends over in a second."""
    shape = (4, _HEADS, _CONTEXT, _HEAD_DIM)
    keys, values = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
    query = torch.randn(4, _HEADS, 1, _HEAD_DIM, dtype=dtype, device=device)
    attend = torch.nn.functional.scaled_dot_product_attention
    return 2 * keys.nbytes / _seconds(device, lambda: attend(query, keys, values))


def _dequantise_bytes(device: torch.device, dtype: torch.dtype) -> float:
    """Bytes that come out of 4-bit codes, two a byte, in groups of 64."""
    codes = torch.randint(0, 255, (_SIDE * _SIDE // 64, 32), dtype=torch.uint8, device=device)
    scale = torch.rand(_SIDE * _SIDE // 64, 1, dtype=dtype, device=device)

    def unpack() -> torch.Tensor:
        return torch.stack((codes & 15, codes >> 4), -1).flatten(1).to(dtype) * scale + scale

    return dtype.itemsize * _SIDE * _SIDE / _seconds(device, unpack)


def _expand_bytes(device: torch.device, dtype: torch.dtype) -> float:
    """Bytes that come out of a mask and its values, half of them zero: torch's own scatter."""
    mask = torch.arange(_SIDE * _SIDE, device=device) % 2 == 0
    values = torch.ones(_SIDE * _SIDE // 2, dtype=dtype, device=device)
    out = torch.zeros(_SIDE * _SIDE, dtype=dtype, device=device)
    return out.nbytes / _seconds(device, lambda: out.masked_scatter_(mask, values))


def _small_operations(device: torch.device, dtype: torch.dtype) -> float:
    """Seconds of what a layer does beside its matrices: norms, rotation, residuals, about 30 small operations."""
    states = torch.randn(1, _SIDE, dtype=dtype, device=device)

    def work() -> None:
        found = states
        for _ in range(10):
            found = (found * 0.5 + states).relu()

    return _seconds(device, work)


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
        found = states + rotate(norm(states))
        found = found + norm(found)
        torch.nn.functional.silu(gate) * up

    return _seconds(device, work, repeats=5) / states.numel()


def _disk_rates(folder: Path) -> Iterator[DiskRate]:
    """Direct reads and writes as they were kept, or short measurements; buffered ones are measured."""
    kept = known_profile(folder)
    if kept is not None:
        yield from (_rate(rate, True) for rate in kept.rates if rate.call in ("read", "write"))
        return
    small = {"blocks": (1 << 20, 4 << 20), "depths": (1, 4), "file_bytes": 64 << 20, "repeats": 3}
    for direct in (True, False):
        for rate in measure_drive(folder, direct=direct, **small):  # type: ignore[arg-type]
            yield _rate(rate, direct)


def _rate(rate: Rate, direct: bool) -> DiskRate:
    return DiskRate(rate.call, direct, rate.block_bytes, rate.depth, rate.median * 1e9)


def _disk(rates: tuple[DiskRate, ...]) -> Disk:
    """What the drive gives by direct I/O, as buffered reads of a file just written come from memory."""
    best = {call: max(rate.bytes_per_s for rate in rates if rate.call == call and rate.direct)
            for call in ("read", "write")}  # fmt: skip
    small = min(rate.bytes_per_s for rate in rates if rate.call == "write" and rate.direct)
    return Disk("measured by direct I/O: fastest kind of request; small writes as the slowest", best["read"],
                best["read"], best["write"], best["write"], small, direct=True)  # fmt: skip
