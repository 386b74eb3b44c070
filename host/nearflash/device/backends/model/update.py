"""Device `model`: the bit-exact reference, for correctness rather than speed."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.kernel.commands import Command, Completion, GradientFormat, UpdateCommand
from nearflash.abi.kernel.config import UpdateConfig
from nearflash.abi.kernel.config import update_config as named_config
from nearflash.abi.optimizers import MasterFormat, StateFormat
from nearflash.abi.python310 import Self
from nearflash.abi.topk import ValueFormat
from nearflash.device.checked import port_beats
from nearflash.device.immediate import ImmediateDevice
from nearflash.device.memory import SimulatedMemory
from nearflash.model.fp.mul import mul
from nearflash.model.gradients.delta import delta_of
from nearflash.model.gradients.topk import expand
from nearflash.model.update.lane import low_precision, optimizer_step
from nearflash.model.update.state import decode, dither, encode, join_master, split_master

__all__ = ["ModelDevice"]


class ModelDevice(ImmediateDevice):
    """Runs each command through nearflash.model."""

    def __init__(self, config: UpdateConfig, memory: SimulatedMemory | None = None) -> None:
        super().__init__("model", config, memory)
        self.build = config.in_software()

    @classmethod
    def open(cls, config: str) -> Self:
        """Open with the build configuration of that name. Raises ConfigError."""
        return cls(named_config(config))

    def _run(self, command: Command) -> Completion:
        assert isinstance(command, UpdateCommand)
        rule, roles = command.rule, tuple(command.rule.torch_names)
        arrays = {name: self.memory.view(*span) for name, span in command.reads().items()}
        stored = {role: [arrays[name] for name in rule.arrays if name.startswith(role)] for role in roles}
        state = {role: decode(_words(stored[role], rule.state_format), role, rule.state_format) for role in roles}
        if command.gradient is GradientFormat.TOPK:
            g = expand(arrays["g"].tobytes(), command.params)
        elif command.gradient is GradientFormat.BF16:
            values = arrays["g"].view("<u2").astype(np.uint32) << np.uint32(16)
            scale = np.full(values.size, command.gradient_scale, np.float32)
            g = mul(values, scale.view(np.uint32))[0].view(np.float32)
        else:
            g = arrays["g"].view("<f4")
        split = command.master is MasterFormat.SPLIT
        halves = [arrays[name].view("<u2") for name in command.master.arrays] if split else []
        p = join_master(*halves).view(np.float32) if split else arrays["p"].view("<f4")
        new = optimizer_step(rule, g, p, **state, copy=command.copy)
        results: dict[str, NDArray[Any] | None] = {"p": new.p, "copy": new.copy}
        if split:
            weight, rest = split_master(new.p.view(np.uint32))
            results |= {"weight": weight, "rest": rest}
            new.copy_overflows = int(np.count_nonzero((weight & 0x7FFF == 0x7F80) & np.isfinite(new.p)))
        for role in roles:
            dithers = dither(role, rule.step, command.first_param, command.params)
            parts = encode(new.state[role], role, rule.state_format, dithers)
            results |= zip((role, f"{role}_scale"), parts, strict=False)
        delta_bytes = None
        if command.delta:
            before = (halves[0], weight) if split else (low_precision(p, command.copy)[0], new.copy)
            results["copy"] = delta = _delta(command, *before)
            delta_bytes = delta.nbytes
        for name, (address, _) in command.writes().items():
            result = results[name]
            assert result is not None
            self.memory.view(address, result.nbytes)[:] = result.view("u1")
        return Completion(
            {
                "params_done": command.params,
                "nonfinite_gradients": new.nonfinite_gradients,
                "copy_overflows": new.copy_overflows,
                **port_beats(command, self.identity.config.port_bytes, delta_bytes),
            }
        )


def _delta(command: UpdateCommand, old: NDArray[np.uint16], words: NDArray[np.uint16] | None) -> NDArray[np.uint8]:
    """Pack what changes from the copy of p to the new one."""
    assert words is not None, "a command without a copy is refused"
    text = delta_of(old.tolist(), words.tolist(), ValueFormat[command.copy.name])
    return np.frombuffer(text, np.uint8)


def _words(stored: list[NDArray[Any]], state_format: StateFormat) -> list[NDArray[Any]]:
    """Bytes as elements, then scales."""
    dtype = {StateFormat.FP32: "<f4", StateFormat.BF16: "<u2", StateFormat.MX8: "<u1"}[state_format]
    return [stored[0].view(dtype), *stored[1:]]
