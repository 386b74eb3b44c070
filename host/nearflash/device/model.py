"""Device `model`: the bit-exact reference, for correctness rather than speed."""

from typing import Self

from nearflash.abi import ABI_VERSION
from nearflash.abi.commands import Command, Completion, UpdateCommand
from nearflash.abi.config import UpdateConfig
from nearflash.abi.config import update_config as named_config
from nearflash.abi.rules import AdamStep
from nearflash.device.base import Identity
from nearflash.device.checked import CheckedDevice, port_beats
from nearflash.device.memory import SimulatedMemory
from nearflash.model.update.lane import adam_step

__all__ = ["ModelDevice"]


class ModelDevice(CheckedDevice):
    """Runs each command through nearflash.model when it is submitted. Cycles are not modelled."""

    QUICK_TO_OPEN = True

    def __init__(self, config: UpdateConfig, memory: SimulatedMemory | None = None) -> None:
        self.memory = memory or SimulatedMemory()
        super().__init__(Identity("model", config, config.digest64, ABI_VERSION, git_revision=0), self.memory)
        self._completion = Completion({})

    @classmethod
    def open(cls, config: str) -> Self:
        """Open with the build configuration of that name. Raises ConfigError."""
        return cls(named_config(config))

    def _start(self, command: Command) -> None:
        assert isinstance(command, UpdateCommand)
        assert isinstance(command.rule, AdamStep)
        g, p, m, v = (self.memory.view(*r).view("<f4") for r in command.reads().values())
        new = adam_step(command.rule, g, p, m, v, command.copy)
        for stream, (address, size_bytes) in command.writes().items():
            self.memory.view(address, size_bytes)[:] = getattr(new, stream).view("u1")
        self._completion = Completion(
            {
                "params_done": command.params,
                "nonfinite_gradients": new.nonfinite_gradients,
                "copy_overflows": new.copy_overflows,
                **port_beats(command, self.identity.config.port_bytes),
            }
        )

    def _finish(self, timeout_s: float) -> Completion:
        return self._completion

    def _abort(self) -> None:
        """Nothing runs between calls."""
