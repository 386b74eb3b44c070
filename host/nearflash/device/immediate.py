"""Devices in software that run each command when it is submitted: the references, and what is quick enough."""

from abc import abstractmethod

from nearflash.abi import ABI_VERSION
from nearflash.abi.errors import StreamError
from nearflash.abi.kernel.commands import Command, Completion
from nearflash.abi.kernel.config import KernelConfig
from nearflash.device.base import Identity
from nearflash.device.checked import CheckedDevice
from nearflash.device.memory import SimulatedMemory

__all__ = ["ImmediateDevice"]


class ImmediateDevice(CheckedDevice):
    """A backend adds `_run`. Cycles are not modelled."""

    QUICK_TO_OPEN = True

    def __init__(self, backend: str, config: KernelConfig, memory: SimulatedMemory | None) -> None:
        self.memory = memory or SimulatedMemory()
        super().__init__(Identity(backend, config, config.digest64, ABI_VERSION, git_revision=0), self.memory)
        self._completion: Completion | StreamError = Completion({})

    @abstractmethod
    def _run(self, command: Command) -> Completion:
        """Do the command. A StreamError is what waiting for it raises."""

    def _start(self, command: Command) -> None:
        try:
            self._completion = self._run(command)
        except StreamError as error:
            self._completion = error

    def _finish(self, timeout_s: float) -> Completion:
        if isinstance(self._completion, StreamError):
            raise self._completion
        return self._completion

    def _abort(self) -> None:
        """Nothing runs between calls."""
