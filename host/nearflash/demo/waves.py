"""A wave file of a small update, from a simulator built with waves."""

from pathlib import Path
from typing import Any

import numpy as np

from nearflash.abi.kernel.commands import CopyFormat, UpdateCommand
from nearflash.abi.optimizers import AdamStep
from nearflash.device import Device

__all__ = ["record_waves"]

PARAMS = 256
WINDOW_CYCLES = 2000


def record_waves(device: Device, path: Path) -> bool:
    """Record one small update on a twin of `device` with waves; False where the device is not simulated gateware."""
    if device.identity.backend != "verilator":
        return False
    # The class came from its entry point: host packages do not import the simulator.
    simulator: Any = type(device)
    with simulator(device.identity.config, memory_bytes=1 << 20, trace=True) as twin:
        buffers = [twin.allocate(4096) for _ in range(5)]
        values = np.random.default_rng(1).standard_normal((4, PARAMS), dtype=np.float32)
        values[3] = np.abs(values[3])
        for buffer, row in zip(buffers, values, strict=False):
            buffer.host.view(np.float32)[:PARAMS] = row
            buffer.sync_to_device()
        g, p, m, v, copy = (buffer.address for buffer in buffers)
        state = {"p": p, "m": m, "v": v}
        adam = AdamStep(1e-3, 1, weight_decay=0.01)
        twin.kernel.start_trace(path, WINDOW_CYCLES)
        twin.run(UpdateCommand(adam, PARAMS, state | {"g": g}, state | {"copy": copy}, CopyFormat.BF16))
        twin.kernel.stop_trace()
    return True
