"""Bench `simulation`: how fast the simulated kernel runs on this machine.

One command of the update kernel, timed from submit to completion; the median of `REPEATS` runs after one to warm up.
"""

import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from nearflash.abi.formats import FP16, FP32
from nearflash.abi.kernel.commands import CopyFormat, UpdateCommand
from nearflash.abi.optimizers import AdamStep
from nearflash.device import Device, open_device

__all__ = ["PARAMS", "REPEATS", "run"]

REPEATS = 5
#: Parameters of the command, by configuration: about half a second each.
PARAMS = {"update-tiny": 200_000, "update-smartssd": 400_000}


def run(params: Mapping[str, int] = PARAMS) -> Iterator[dict[str, Any]]:
    """One object for each configuration; `spread` is (slowest - fastest) over the median."""
    for config, count in params.items():
        with open_device(f"verilator:{config}") as device:
            command = _command(device, count)
            rates = [_cycles_per_second(device, command) for _ in range(REPEATS + 1)][1:]
            median = statistics.median(rates)
            yield {
                "config": config,
                "params": count,
                "cycles_per_second": round(median),
                "spread": round((max(rates) - min(rates)) / median, 3),
                "unit": "cycles/s",
            }


def _cycles_per_second(device: Device, command: UpdateCommand) -> float:
    start = time.perf_counter()
    cycles = device.run(command).counters["cycles"]
    return cycles / (time.perf_counter() - start)


def _command(device: Device, params: int) -> UpdateCommand:
    """AdamW on random parameters, in place, with an fp16 copy."""
    rng = np.random.default_rng(0)
    addresses = {}
    for name, scale in {"g": 1e-3, "p": 1.0, "m": 1e-4, "v": 1e-6}.items():
        buffer = device.allocate(params * FP32.bytes)
        values = np.abs(rng.normal(0, scale, params)).astype(np.float32)
        buffer.host.view(np.float32)[:] = values
        buffer.sync_to_device()
        addresses[name] = buffer.address
    return UpdateCommand(
        AdamStep(lr=1e-3, step=10, weight_decay=0.01),
        params,
        addresses,
        {name: addresses[name] for name in ("p", "m", "v")} | {"copy": device.allocate(params * FP16.bytes).address},
        CopyFormat.FP16,
    )
