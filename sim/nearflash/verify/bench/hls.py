"""Bench `hls`: every HLS kernel under g++ against the model, word by word, on edge values and random ones.

Seconds are those of the threaded simulation, not of hardware.
"""

import time
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np

from nearflash.abi.kernel.commands import CopyFormat
from nearflash.abi.kernel.config import UpdateConfig, update_config
from nearflash.abi.optimizers import OptimizerStep
from nearflash.abi.topk import ValueFormat
from nearflash.bench.options import Option
from nearflash.device.backends.model.update import ModelDevice
from nearflash.device.base import Device
from nearflash.device.memory import PAGE_BYTES, anonymous
from nearflash.device.selftest.update import UpdateVector, differing_words, run_update
from nearflash.model.gradients.topk import expand, pack
from nearflash.model.weights.bitmap import expand_row
from nearflash.sim.hls.build import HLS
from nearflash.sim.hls.device import HlsDevice
from nearflash.sim.hls.kernels import call_of
from nearflash.sim.hls.library import HlsLibrary
from nearflash.sim.hls.vectors import edge_state, rules

__all__ = ["compare", "run"]

_COUNTERS = ("nonfinite_gradients", "copy_overflows")


def run(
    params: Annotated[int, Option("Parameters of each update.", int)] = 1 << 20,
    config: Annotated[str, Option("Build configuration of the kernels.")] = "update-smartssd",
    seed: Annotated[int, Option("Seed of the random state.", int)] = 1,
) -> Iterator[dict[str, Any]]:
    """Every rule on `params` parameters with a bf16 copy, by the host's float and by Fp32; then the expanders."""
    build = update_config(config)
    with ModelDevice(build) as model:
        for real in ("float", "Fp32"):
            with HlsDevice(build, real=real) as device:
                for rule in rules():
                    words, mismatches, seconds = compare(device, model, rule, params, seed)
                    yield {
                        "config": build.full_name,
                        "kernel": call_of(rule).kernel.name,
                        "step": rule.step,
                        "weight_decay": rule.weight_decay,
                        "scalar": real,
                        "params": params,
                        "words": words,
                        "mismatches": mismatches,
                        "seconds": seconds,
                    }

    yield from _expanders(build, params, seed)


def _expanders(build: UpdateConfig, params: int, seed: int) -> Iterator[dict[str, Any]]:
    """Top-K streams of one pair in a hundred in each format, and a bitmap of which half is ones."""
    rng = np.random.default_rng(seed)
    indices = np.flatnonzero(rng.random(params) < 0.01)
    for value_format in ValueFormat:
        values = rng.integers(0, 1 << value_format.number_format.bits, indices.size, np.uint64).astype(np.uint32)
        stream = pack(indices, values, params, value_format)
        expected = expand(stream, params).view(np.uint32)
        dense, seconds = _expand(build, "expand_topk", [stream], expected.nbytes, [len(stream), params])
        yield _row(build, f"expand_topk {value_format.name.lower()}", expected, dense.view(np.uint32), seconds)
    mask = rng.random(params) < 0.5
    packed = rng.integers(1, 1 << 16, int(mask.sum()), np.uint16)
    bitmap = np.packbits(mask, bitorder="little").tobytes()
    elements = expand_row(bitmap, packed.tobytes(), params, "<u2")
    dense, seconds = _expand(build, "expand_bitmap", [bitmap, packed.tobytes()], elements.nbytes, [params, packed.size])
    yield _row(build, "expand_bitmap", elements, dense.view(np.uint16), seconds)


def _row(build: UpdateConfig, kernel: str, expected: Any, actual: Any, seconds: float) -> dict[str, Any]:
    mismatches = int(np.count_nonzero(expected != actual))
    return {"config": build.full_name, "kernel": kernel, "params": expected.size, "words": expected.size,
            "mismatches": mismatches, "seconds": seconds}  # fmt: skip


def _expand(
    build: UpdateConfig, name: str, sources: list[bytes], size_bytes: int, counts: list[int]
) -> tuple[Any, float]:
    """Bytes that an expander makes, (size_bytes,), and seconds; all ones where it finds a fault."""
    library = HlsLibrary.build(name, (HLS / "kernels" / f"{name}.cpp").read_text(), build)
    memories = [anonymous(-(-size // PAGE_BYTES) * PAGE_BYTES) for size in (*map(len, sources), size_bytes)]
    for memory, source in zip(memories, sources, strict=False):
        memory[: len(source)] = np.frombuffer(source, np.uint8)
    fault = np.zeros(1, np.uint32)
    start = time.perf_counter()
    library.run([*(int(x.ctypes.data) for x in memories), *counts, int(fault.ctypes.data)])
    seconds = time.perf_counter() - start
    if fault[0]:
        memories[-1][:] = 0xFF
    return memories[-1][:size_bytes], seconds


def compare(device: Device, model: Device, rule: OptimizerStep, params: int, seed: int) -> tuple[int, int, float]:
    """Words of p, the rule's arrays, the copy and the counters; how many differ; seconds of the device's run.

    The kernel is built before the time is taken.
    """
    names = ("g", "p", *rule.arrays)
    state = np.zeros((4, params), np.float32)  # g, p, m, v; what the rule has no array for is not read
    state[[("g", "p", "m", "v").index(name) for name in names]] = edge_state(len(names) - 1, params, seed)
    run_update(device, UpdateVector(rule, 1, CopyFormat.BF16), state[:, :1])
    case = UpdateVector(rule, params, CopyFormat.BF16)
    start = time.perf_counter()
    actual, counters = run_update(device, case, state)
    seconds = time.perf_counter() - start
    expected, reference = run_update(model, case, state)
    words, differing = differing_words(actual, expected)
    return words + len(_COUNTERS), differing + sum(counters[name] != reference[name] for name in _COUNTERS), seconds
