"""Bench `update`: the kernel in cycle-accurate simulation against its roofline, and against the model word by word.

Gradients are `fp32`, or `topk:` and the share of them in a stream of fp16 values. m and v are stored as `fp32`, `bf16`
or `mx8`; of mx8 the parameters past the last whole block of 32 are left out.

Cycles are those of the kernel's own counter, from start to the last write response. The roofline is the largest of
three times: the lanes (1 / W cycles a parameter), the widest use of one port and direction, and the memory's bandwidth
where the model of the memory has a limit; `bound` names it.
"""

from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import product
from typing import Annotated, Any

import numpy as np

from nearflash.abi.errors import CommandError
from nearflash.abi.formats import FP32
from nearflash.abi.kernel.commands import CopyFormat
from nearflash.abi.kernel.config import UpdateConfig, update_config
from nearflash.abi.optimizers import AdagradStep, AdamStep, LionStep, Profile, SgdStep, StateFormat
from nearflash.bench.options import Option, check_choices
from nearflash.device.backends.model.update import ModelDevice
from nearflash.device.selftest.update import UpdateVector, differing_words, random_state, run_update
from nearflash.sim.verilator.device import VerilatorDevice
from nearflash.sim.verilator.kernel import MemoryModel

__all__ = ["run"]

DDR4_BYTES_PER_SECOND = 19.2e9
"""One DDR4-2400 channel of 64 bits, at its peak."""
RULES: tuple[AdamStep | SgdStep | AdagradStep | LionStep, ...] = (
    *(AdamStep(1e-3, 10, weight_decay=0.01, profile=profile) for profile in Profile),
    AdamStep(1e-3, 10, weight_decay=0.01, decoupled=False),
    *(
        rule
        for profile in (Profile.IEEE, Profile.TORCH_FUSED)
        for rule in (
            SgdStep(0.1, 10, weight_decay=0.01, profile=profile),
            SgdStep(0.1, 10, momentum=0.9, nesterov=True, weight_decay=0.01, profile=profile),
            AdagradStep(0.1, 10, weight_decay=0.01, profile=profile),
        )
    ),
    LionStep(1e-3, 10, weight_decay=0.01),
)
_LATENCY = {"read_latency_cycles": 60, "write_latency_cycles": 40}


def run(
    params: Annotated[int, Option("Parameters of each row.", int)] = 1_000_000,
    config: Annotated[str, Option("Build configuration of the kernel.")] = "update-smartssd",
    seed: Annotated[int, Option("Seed of the random state.", int)] = 1,
    gradients: Annotated[
        Collection[str], Option("Formats of the gradients: fp32, or topk:SHARE.", many=True, metavar="FORMAT")
    ] = ("fp32", "topk:0.01"),
    state_formats: Annotated[
        Collection[str], Option("Formats of the moments.", many=True, choices=tuple(map(str, StateFormat)))
    ] = tuple(map(str, StateFormat)),
) -> Iterator[dict[str, Any]]:
    """Every rule and profile on a memory without bandwidth limit, then AdamW behind one DDR4 channel; with Top-K
    gradients or narrow state: AdamW.

    Raises CommandError for other gradients and formats.
    """
    build, densities = update_config(config), {kind: _density(kind) for kind in gradients}
    check_choices("state_formats", state_formats, build.state_formats)
    free = MemoryModel(**_LATENCY)
    shared = MemoryModel(**_LATENCY, total_bytes_per_cycle=DDR4_BYTES_PER_SECOND / build.clock_hz)
    state = random_state(np.random.default_rng(seed), params)
    with VerilatorDevice(build, memory_bytes=1 << 30) as device:
        for kind, form, rule, model in product(gradients, state_formats, RULES, (free, shared)):
            if rule is not RULES[0] and ((kind, form) != ("fp32", "fp32") or model is shared):
                continue
            device.kernel.configure(model)
            whole = params - params % StateFormat(form).block_params
            case = UpdateVector(
                replace(rule, state_format=StateFormat(form)), whole, CopyFormat.BF16, density=densities[kind]
            )
            row = _measure(device, build, case, state[:, :whole], model)
            yield {"gradients": kind, "state_format": str(form), **row}


def _density(gradients: str) -> float | None:
    """Share of the gradients that a stream has; None: all, dense."""
    if gradients == "fp32":
        return None
    kind, _, share = gradients.partition(":")
    try:
        if kind == "topk" and 0 <= float(share) <= 1:
            return float(share)
    except ValueError:
        pass
    raise CommandError(f"gradients must be fp32 or topk:SHARE with a share in [0, 1], not {gradients!r}")


def _measure(
    device: VerilatorDevice, build: UpdateConfig, case: UpdateVector, state: Any, model: MemoryModel
) -> dict[str, Any]:
    results, counters = run_update(device, case, state)
    with ModelDevice(build) as reference:
        expected, _ = run_update(reference, case, state)
    _, mismatches = differing_words(results, expected)
    cycles_per_param = counters["cycles"] / case.params
    moved_bytes = (counters["read_beats"] + counters["write_beats"]) * build.port_bytes
    limits = {"lanes": 1 / build.lanes, "port": FP32.bytes / build.port_bytes}
    if model.total_bytes_per_cycle:
        limits["memory"] = moved_bytes / case.params / model.total_bytes_per_cycle
    bound = max(limits, key=lambda name: limits[name])
    return {
        "config": build.full_name,
        "profile": str(case.rule.profile),
        "optimizer": case.optimizer,
        "arrays": ", ".join(("p", *case.rule.arrays)),
        "params": case.params,
        "cycles_per_param": cycles_per_param,
        "port_roofline_fraction": limits[bound] / cycles_per_param,
        "bound": bound,
        "of": "cycles that the bound alone would take / cycles from start to the last write response",
        "memory_bytes_per_cycle": model.total_bytes_per_cycle or "no limit",
        "read_latency_cycles": model.read_latency_cycles,
        "mismatches": mismatches,
        "ddr_bytes_per_param": moved_bytes / case.params,
        "unit": "cycles per parameter",
    }
