"""Bench `hls`: every HLS update kernel under g++ against the model, word by word, on edge values and random ones."""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from nearflash.abi.commands import CopyFormat, UpdateCommand
from nearflash.abi.config import update_config
from nearflash.abi.rules import OptimizerStep
from nearflash.device.base import Device
from nearflash.device.model import ModelDevice
from nearflash.sim.hls.device import HlsDevice
from nearflash.sim.hls.kernels import call_of
from nearflash.sim.hls.vectors import edge_state, rules

__all__ = ["compare", "run"]

_PAGE_BYTES = 4096


def run(params: int = 1 << 20, config_name: str = "update-smartssd", seed: int = 1) -> Iterator[dict[str, Any]]:
    """Every rule on `params` parameters with a bf16 copy, by the host's float and by the integers of Fp32."""
    build = update_config(config_name)
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


def compare(device: Device, model: Device, rule: OptimizerStep, params: int, seed: int) -> tuple[int, int, float]:
    """Words of p, the rule's arrays, the copy and the counters; how many differ; seconds of the device's run.

    The kernel is built before the time is taken.
    """
    state = edge_state(1 + len(rule.arrays), params, seed)
    _results(device, rule, state[:, :1])
    start = time.perf_counter()
    actual = _results(device, rule, state)
    seconds = time.perf_counter() - start
    expected = _results(model, rule, state)
    words = sum(array.size for array in expected)
    differing = sum(int(np.count_nonzero(a != b)) for a, b in zip(actual, expected, strict=True))
    return words, differing, seconds


def _results(device: Device, rule: OptimizerStep, state: Any) -> list[Any]:
    """Patterns of p and the arrays, the copy's, and the counters that are no beats."""
    names, params = ("p", *rule.arrays), state.shape[1]
    slot = -(-4 * params // _PAGE_BYTES) * _PAGE_BYTES
    buffer = device.allocate(slot * (2 * len(names) + 2))
    try:
        places = [buffer.address + slot * k for k in range(2 * len(names) + 2)]
        for k, row in enumerate(state):
            buffer.host[slot * k : slot * k + row.nbytes] = row.view(np.uint8)
        buffer.sync_to_device()
        inputs = dict(zip(("g", *names), places, strict=False))
        outputs = dict(zip((*names, "copy"), places[len(state) :], strict=True))
        counters = device.run(UpdateCommand(rule, params, inputs, outputs, CopyFormat.BF16)).counters
        buffer.sync_from_device()
        words = buffer.host.reshape(-1, slot)[len(state) :].view(np.uint32)[:, :params]
        copy = buffer.host[-slot:].view(np.uint16)[:params]
        counts = np.array([counters["nonfinite_gradients"], counters["copy_overflows"]])
        return [*(row.copy() for row in words[: len(names)]), copy.copy(), counts]
    finally:
        device.free(buffer)
