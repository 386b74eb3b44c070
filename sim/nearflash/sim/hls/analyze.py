"""How fast an update kernel can be: operations counted from its struct, and which of lanes, ports, DDR and flash binds.

Operations are counted by running the struct on a counting scalar; the rates are arithmetic on them, not measured.
II is 1 by construction (no value goes from one parameter to the next), unless a synthesis report has another.
"""

import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from nearflash.abi.formats import FP32
from nearflash.abi.kernel.config import UpdateConfig
from nearflash.sim.hls.build import build_shim, shim
from nearflash.sim.hls.check import STEPS
from nearflash.sim.hls.kernels import HlsCall, call_of
from nearflash.sim.hls.rule import HlsRule
from nearflash.sim.hls.vectors import edge_state

__all__ = ["LATENCY_CYCLES", "OPERATIONS", "Estimate", "KernelHost", "count_operations", "estimate", "rule_calls"]

OPERATIONS = ("add", "mul", "fma", "div", "sqrt", "compare")
LATENCY_CYCLES = {"add": 9, "mul": 7, "fma": 16, "div": 30, "sqrt": 30, "compare": 1}
"""Cycles of pipelined units that keep subnormals: those of rtl/. A synthesis report has those of the HLS kernel."""
_SAMPLES = 200
_COPY_BYTES = 2


@dataclass(frozen=True)
class KernelHost:
    """Surroundings of a kernel, in bytes a second."""

    flash_bytes_per_s: float = 3.3e9
    """P2P link between drive and device memory, each direction."""
    ddr_bytes_per_s: float = 19.2e9
    """Device memory, reads and writes together: one DDR4-2400 channel of 64 bits at its peak."""


@dataclass(frozen=True)
class Estimate:
    """Rates in parameters a second, by what would bind."""

    config: UpdateConfig
    arrays: int
    """State arrays, p among them."""
    operations: dict[str, int]
    """Of one parameter's step."""
    depth_cycles: int
    """Of the lane, without the streams around it."""
    ii: int
    clock_hz: float
    rates: dict[str, float] = field(default_factory=dict)

    @property
    def bound(self) -> str:
        """Name of the lowest rate, which binds."""
        return min(self.rates, key=lambda name: self.rates[name])


def rule_calls(kind: type[HlsRule]) -> Iterator[HlsCall]:
    """Calls of a user's rule that take its branches: early and late steps, with and without weight decay."""
    for step in STEPS:
        for weight_decay in (0.0, 0.1):
            yield call_of(kind(lr=1e-3, step=step, weight_decay=weight_decay))


def count_operations(calls: Iterable[HlsCall], seed: int = 0) -> tuple[dict[str, int], int]:
    """Operations of one parameter's step by name, and the cycles of its longest path.

    Each count is the largest over edge values and the calls: a branch that none of them takes is not counted.

    Raises CompileError.
    """
    calls = list(calls)
    kernel = calls[0].kernel
    defines = {
        "HEADER": f'"{kernel.header}"', "OPTIMIZER": kernel.optimizer,
        "FILL_STATE": " ".join(f"FIELD({name})" for name in kernel.arrays),
        "FILL_SCALARS": " ".join(f"FIELD({name})" for name in kernel.scalars),
    }  # fmt: skip
    path = build_shim(f"count_{kernel.name}", shim("hls_count.cpp"), defines=defines,
                      include=[kernel.folder] if kernel.folder else [])  # fmt: skip
    count = ctypes.CDLL(str(path)).hls_count
    latency = np.array([LATENCY_CYCLES[name] for name in OPERATIONS], np.intc)
    most, depth, counts = np.zeros(len(OPERATIONS), np.intc), 0, np.zeros(len(OPERATIONS), np.intc)
    state = edge_state(len(kernel.arrays), _SAMPLES, seed)
    for call in calls:
        scalars = np.array([call.scalars[name] for name in kernel.scalars], np.float32)
        for values in state.T:
            inputs = np.concatenate([values, scalars])
            cycles = count(*(ctypes.c_void_p(x.ctypes.data) for x in (latency, inputs, counts)))
            most, depth = np.maximum(most, counts), max(depth, cycles)
    return {name: int(n) for name, n in zip(OPERATIONS, most, strict=True)}, depth


def estimate(
    calls: Iterable[HlsCall], config: UpdateConfig, machine: KernelHost | None = None, *, ii: int = 1,
    clock_hz: float | None = None,
) -> Estimate:  # fmt: skip
    """Rates of the kernel of `calls` on a build; `ii` and `clock_hz` of a report in place of the aims.

    A parameter of n arrays moves 4n bytes over the flash link each way; through DDR these 8n, and what the kernel reads
    and writes: 8n, its gradient twice (in from the host, out to the kernel) and its 16-bit copy twice.
    """
    machine, calls = machine or KernelHost(), list(calls)
    arrays, clock = len(calls[0].kernel.arrays), clock_hz or config.clock_hz
    operations, depth = count_operations(calls)
    ddr_bytes = 4 * arrays * FP32.bytes + 2 * FP32.bytes + 2 * _COPY_BYTES
    rates = {
        "lanes": config.lanes * clock / ii,
        "port": config.port_bytes / FP32.bytes * clock,
        "DDR": machine.ddr_bytes_per_s / ddr_bytes,
        "flash": machine.flash_bytes_per_s / (arrays * FP32.bytes),
    }
    return Estimate(config, arrays, operations, depth, ii, clock, rates)
