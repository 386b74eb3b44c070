"""Random updates on a device, against the model."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.delta import DeltaHeader
from nearflash.abi.errors import CommandError
from nearflash.abi.kernel.commands import CopyFormat, GradientFormat, UpdateCommand
from nearflash.abi.kernel.config import UpdateConfig
from nearflash.abi.optimizers import (
    BLOCK_PARAMS,
    AdagradStep,
    AdamStep,
    LionStep,
    MasterFormat,
    OptimizerStep,
    Profile,
    SgdStep,
    StateFormat,
)
from nearflash.abi.optimizers.state import HALVES, MX8, TILE_PARAMS
from nearflash.abi.topk import ValueFormat
from nearflash.device.backends.host.topk import encode_values, pack
from nearflash.device.base import Buffer, Device
from nearflash.device.memory import PAGE_BYTES
from nearflash.device.registry import open_device
from nearflash.device.selftest.comparison import Comparison

__all__ = ["UpdateVector", "compare_updates", "differing_words", "random_state", "run_update"]

ARRAYS = ("p", *HALVES, "m", "m_scale", "v", "v_scale")
_RULES: tuple[AdamStep | SgdStep | AdagradStep | LionStep, ...] = (
    AdamStep(1e-3, 10, weight_decay=0.01),
    SgdStep(0.1, 10, momentum=0.9, nesterov=True, weight_decay=0.01),
    SgdStep(0.1, 10),
    AdagradStep(0.1, 10, weight_decay=0.01),
    LionStep(1e-3, 10, weight_decay=0.01),
)


@dataclass(frozen=True)
class UpdateVector:
    """One update: its scalars, the number of parameters and the copy."""

    rule: OptimizerStep
    params: int
    copy: CopyFormat = CopyFormat.NONE
    in_place: bool = False
    """Outputs over the inputs, or in a second slot."""
    density: float | None = None
    """Share of the gradients that come, in a Top-K stream of fp16 values; None: all, dense."""
    first_param: int = 0
    """Place of the first parameter in the flat vector."""
    delta: bool = False
    """What changes, in the place of the copy."""
    master: MasterFormat = MasterFormat.FP32

    def __str__(self) -> str:
        """Profile, optimizer, copy, gradients, state format, master."""
        gradients = "" if self.density is None else f" topk:{self.density:g}"
        narrow = self.rule.state_format is not StateFormat.FP32
        state = f" {self.rule.state_format}" if narrow else ""
        delta = " delta" if self.delta else ""
        master = f" {self.master}" if self.master is MasterFormat.SPLIT else ""
        return f"{self.rule.profile:<12}{self.optimizer:<9}{self.copy.name}{delta}{gradients}{state}{master}"

    @property
    def optimizer(self) -> str:
        """Name of the optimizer, as people write it."""
        decoupled = isinstance(self.rule, AdamStep) and self.rule.decoupled
        names = {"adam": "Adam", "sgd": "SGD", "adagrad": "AdaGrad", "lion": "Lion"}
        return "AdamW" if decoupled else names.get(self.rule.optimizer, self.rule.optimizer)

    def stream(self, gradients: NDArray[np.float32]) -> NDArray[np.uint8]:
        """The gradients' Top-K stream: a random share of them, the finite ones within the range of fp16."""
        assert self.density is not None
        indices = np.flatnonzero(np.random.default_rng(self.params).random(self.params) < self.density)
        bits = encode_values(gradients[indices], ValueFormat.FP16)
        return pack(indices, bits, self.params, ValueFormat.FP16)

    def encode_state(self, state: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
        """Arrays of the `random_state` as the command reads them, by name: in format bf16 m and v are cut, in mx8 they
        have the scales of their blocks and, where they are not zero, any codes but that of NaN.
        """
        arrays: dict[str, NDArray[Any]] = {"g": state[0] if self.density is None else self.stream(state[0])}
        if self.master is MasterFormat.SPLIT:
            words = state[1].view(np.uint32)
            arrays["weight"] = (words + np.uint32(0x8000) >> 16).astype(np.uint16)
            arrays["rest"] = words.astype(np.uint16)
        else:
            arrays["p"] = state[1]
        for role, values in zip(("m", "v"), state[2:], strict=True):
            if self.rule.state_format is StateFormat.FP32:
                arrays[role] = values
            elif self.rule.state_format is StateFormat.BF16:
                arrays[role] = (values.view(np.uint32) >> 16).astype(np.uint16)
            else:
                codes = np.random.default_rng(self.params).integers(0, 256, values.size, np.uint8)
                arrays[role] = codes * ((values != 0) & (codes != MX8[role].not_a_number))
                fields = values.view(np.uint32).reshape(-1, BLOCK_PARAMS) >> 23 & 0xFF
                arrays[f"{role}_scale"] = fields.max(axis=1).astype(np.uint8)
        return arrays


def random_state(rng: np.random.Generator, params: int) -> NDArray[np.float32]:
    """g, p, m, v of a run in progress, fp32, (4, params): wide exponents, zeros and a few non-finite gradients."""
    state = rng.standard_normal((4, params)) * 10.0 ** rng.uniform(-9, 3, (4, params))
    state[2:] *= rng.random(params) < 0.9
    state[3] = np.square(state[3])
    state[0, rng.random(params) < 0.01] = np.inf
    return state.astype(np.float32)


def run_update(
    device: Device, case: UpdateVector, state: NDArray[np.float32]
) -> tuple[dict[str, bytes], dict[str, int]]:
    """Run the case in buffers of its own; returns the bytes of each array written by name, and the counters."""
    buffers: dict[str, Buffer] = {}
    try:
        for name in ("g", *ARRAYS, *(f"{name}_out" for name in (*ARRAYS, "copy"))):
            buffers[name] = device.allocate(-(-6 * case.params // PAGE_BYTES) * PAGE_BYTES)
        arrays = case.encode_state(state)
        for name, values in arrays.items():
            buffers[name].host[: values.nbytes] = values.view(np.uint8)
            buffers[name].sync_to_device(0, values.nbytes)
        outputs = {name: buffers[name if case.in_place else f"{name}_out"] for name in ARRAYS}
        outputs["copy"] = buffers["copy_out"]
        topk = case.density is not None
        command = UpdateCommand(
            case.rule,
            case.params,
            {name: buffers[name].address for name in ("g", *case.master.arrays, *case.rule.arrays)},
            {name: outputs[name].address for name in (*case.master.arrays, *case.rule.arrays, "copy")},
            case.copy,
            GradientFormat.TOPK if topk else GradientFormat.FP32,
            arrays["g"].nbytes if topk else 0,
            case.first_param,
            delta=case.delta,
            master=case.master,
        )
        counters = device.run(command).counters
        results = {}
        for name, (_, size_bytes) in command.writes().items():
            outputs[name].sync_from_device(0, size_bytes)
            results[name] = outputs[name].host[:size_bytes].tobytes()
        if case.delta:  # as long as its header states
            results["copy"] = results["copy"][: DeltaHeader.size_in(results["copy"])]
        return results, counters
    finally:
        for buffer in buffers.values():
            device.free(buffer)


def differing_words(actual: Mapping[str, bytes], expected: Mapping[str, bytes]) -> tuple[int, int]:
    """Elements in the results of two `run_update`, and how many of them differ."""
    words = mismatches = 0
    for name, data in actual.items():
        if len(data) != len(expected[name]):  # a delta: none of it is right
            words, mismatches = words + len(data), mismatches + len(data)
            continue
        width = 4 * len(data) / (len(actual["p"]) if "p" in actual else 2 * len(actual["weight"]))
        dtype = f"<u{int(width) if width in (2, 4) else 1}"
        differs = np.frombuffer(data, dtype) != np.frombuffer(expected[name], dtype)
        words, mismatches = words + differs.size, mismatches + int(np.count_nonzero(differs))
    return words, mismatches


def compare_updates(device: Device, *, params: int, seed: int) -> Iterator[Comparison]:
    """Every rule, profile and copy, in place and in two slots, Top-K gradients, every state format that the device has,
    across the end of a tile of the dither, with a split master, too, against the model; in format mx8 of whole blocks
    that hold `params`.

    Raises CommandError for less than one parameter, and what the device raises.
    """
    if params < 1:
        raise CommandError(f"params must be at least 1, not {params!r}")
    rng = np.random.default_rng(seed)
    with open_device(f"model:{device.identity.config.full_name}") as model:
        for profile in Profile:
            for decoupled, copy in ((True, CopyFormat.BF16), (False, CopyFormat.FP16)):
                adam = AdamStep(1e-3, 10, weight_decay=0.01, decoupled=decoupled, profile=profile)
                case = UpdateVector(adam, params, copy, in_place=decoupled)
                state = random_state(rng, params)
                yield _compare(device, model, case, state)
        for other in _RULES[1:]:
            yield _compare(device, model, UpdateVector(other, params, CopyFormat.BF16), random_state(rng, params))
        build = getattr(device, "build", device.identity.config)
        if isinstance(build, UpdateConfig):
            if build.delta:
                for copy in (CopyFormat.BF16, CopyFormat.FP16):
                    case = UpdateVector(replace(adam, lr=1e-5), params, copy, in_place=True, delta=True)
                    yield _compare(device, model, case, random_state(rng, params))
            densities = (None, 0.2) if "topk" in build.gradients else (None,)
            if len(densities) > 1:
                case = UpdateVector(adam, params, CopyFormat.BF16, density=0.2)
                yield _compare(device, model, case, random_state(rng, params))
            blocks = -(-params // BLOCK_PARAMS) * BLOCK_PARAMS
            for form, rule in product(map(StateFormat, build.state_formats[1:]), _RULES):
                case = UpdateVector(replace(rule, state_format=form), blocks if form is StateFormat.MX8 else params,
                            CopyFormat.BF16, rule is _RULES[0], densities[-1] if rule is _RULES[0] else None,
                            3 * TILE_PARAMS - BLOCK_PARAMS)  # fmt: skip
                yield _compare(device, model, case, random_state(rng, case.params))
            for form in map(StateFormat, build.state_formats if MasterFormat.SPLIT in build.masters else ()):
                case = UpdateVector(replace(adam, state_format=form), blocks, in_place=True, master=MasterFormat.SPLIT)
                yield _compare(device, model, case, random_state(rng, blocks))


def _compare(device: Device, model: Device, case: UpdateVector, state: NDArray[np.float32]) -> Comparison:
    (actual, _), (expected, _) = run_update(device, case, state), run_update(model, case, state)
    return Comparison(str(case), *differing_words(actual, expected))
