"""Device `host`: the same commands on the host's cores, for machines without a board."""

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Self

from nearflash.abi import ABI_VERSION
from nearflash.abi.commands import Command, Completion, UpdateCommand
from nearflash.abi.config import UpdateConfig
from nearflash.abi.config import update_config as named_config
from nearflash.abi.errors import WaitTimeoutError
from nearflash.abi.rules import AdamStep
from nearflash.device.base import Identity
from nearflash.device.checked import CheckedDevice, port_beats
from nearflash.device.memory import SimulatedMemory
from nearflash.device.vector_lane import BLOCK_PARAMS, VectorLane

__all__ = ["HostDevice"]

THREADS = min(4, os.cpu_count() or 1)
"""The update is bound by memory bandwidth; more threads do not help."""


class HostDevice(CheckedDevice):
    """Runs commands in threads behind the caller's back, on memory of the host. Cycles are not modelled."""

    QUICK_TO_OPEN = True

    def __init__(self, config: UpdateConfig, memory: SimulatedMemory | None = None) -> None:
        self.memory = memory or SimulatedMemory()
        super().__init__(Identity("host", config, config.digest64, ABI_VERSION, git_revision=0), self.memory)
        self._pool = ThreadPoolExecutor(THREADS, "nearflash-host")
        self._aborted = threading.Event()
        self._parts: list[Future[tuple[int, int]]] = []
        self._command: UpdateCommand | None = None

    @classmethod
    def open(cls, config: str) -> Self:
        """Open with the build configuration of that name. Raises ConfigError."""
        return cls(named_config(config))

    def close(self) -> None:
        """Abort what runs and end the threads; may be called twice."""
        super().close()
        self._pool.shutdown()

    def _start(self, command: Command) -> None:
        assert isinstance(command, UpdateCommand)
        self._command = command
        self._parts = [self._pool.submit(self._work, command, thread) for thread in range(THREADS)]

    def _finish(self, timeout_s: float) -> Completion:
        command = self._command
        assert command is not None
        if wait(self._parts, timeout_s).not_done:
            raise WaitTimeoutError(
                f"update of {command.params} parameters must end within {timeout_s} s; it still runs"
            )
        counts = [part.result() for part in self._parts]
        return Completion(
            {
                "params_done": command.params,
                "nonfinite_gradients": sum(nonfinite for nonfinite, _ in counts),
                "copy_overflows": sum(overflows for _, overflows in counts),
                **port_beats(command, self.identity.config.port_bytes),
            }
        )

    def _abort(self) -> None:
        self._aborted.set()
        wait(self._parts)
        self._aborted.clear()

    def _work(self, command: UpdateCommand, thread: int) -> tuple[int, int]:
        """Every THREADS-th block of the command; counts as VectorLane.step."""
        inputs = [self.memory.view(*r).view("<f4") for r in command.reads().values()]
        outputs = [
            self.memory.view(*r).view("<u2" if stream == "copy" else "<f4") for stream, r in command.writes().items()
        ]
        assert isinstance(command.rule, AdamStep)
        lane = VectorLane(command.rule, command.copy)
        nonfinite = overflows = 0
        for start in range(thread * BLOCK_PARAMS, command.params, THREADS * BLOCK_PARAMS):
            if self._aborted.is_set():
                break
            block = slice(start, start + BLOCK_PARAMS)
            counts = lane.step([x[block] for x in inputs], [x[block] for x in outputs])
            nonfinite, overflows = nonfinite + counts[0], overflows + counts[1]
        return nonfinite, overflows
