"""A kernel's clock, by the cycles that it counts in commands whose time the host takes."""

import numpy as np

from nearflash.abi.attention.codeword import PageTag
from nearflash.abi.bitmap import ElementFormat
from nearflash.abi.kernel.commands import UpdateCommand
from nearflash.abi.kernel.config import AttendConfig, ExpandConfig
from nearflash.abi.optimizers import AdamStep
from nearflash.device.base import Device
from nearflash.device.drivers.attend import attend
from nearflash.device.drivers.expand import expand_matrix
from nearflash.device.registers import RegisterDevice
from nearflash.device.selftest.attend import place_heads
from nearflash.model.attention.random_vectors import random_mode_vector
from nearflash.model.weights.bitmap import pack

__all__ = ["measure_clock"]

_FIRST_CYCLES, _LAST_CYCLES, _GROWTH = 1 << 12, 1 << 24, 4
_TOKENS = 256


def measure_clock(device: RegisterDevice) -> tuple[int, float]:
    """Cycles of a command of `device.clock_run_s` or more, and its time, s, from start to when its end was seen.

    The time is at least that of the cycles: what it has beside them, the host's polls, falls with its length. Raises
    what the device raises.
    """
    size = _FIRST_CYCLES
    while True:
        _occupy(device, size)
        if device.run_s >= device.clock_run_s or size >= _LAST_CYCLES:
            return device.read("cycles"), device.run_s
        size *= _GROWTH


def _occupy(device: Device, cycles: int) -> None:
    """A command that takes about so many cycles, whatever comes of it."""
    config = device.identity.config
    if isinstance(config, ExpandConfig):
        rows = -(-cycles * config.width // config.columns_max)
        expand_matrix(device, pack(np.zeros((rows, config.columns_max), np.uint8), ElementFormat.INT8, rows))
    elif isinstance(config, AttendConfig):
        vector = random_mode_vector(np.random.default_rng(1), "dense", 64, 1, _TOKENS, PageTag(1, 1, 1))
        with place_heads(device, [vector]) as ((head,), _):
            attend(device, [head] * max(1, cycles // _FIRST_CYCLES), repeats=0)
    else:
        _update(device, cycles)


def _update(device: Device, params: int) -> None:
    """An update in place, of whatever lies in the memory."""
    buffers = {name: device.allocate(4 * params) for name in "gpmv"}
    try:
        inputs = {name: buffer.address for name, buffer in buffers.items()}
        device.run(UpdateCommand(AdamStep(1e-3, 1), params, inputs, {name: inputs[name] for name in "pmv"}))
    finally:
        for buffer in buffers.values():
            device.free(buffer)
