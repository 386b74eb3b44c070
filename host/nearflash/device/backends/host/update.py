"""Device `host`: the same commands on the host's cores, for machines without a board."""

import os
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi import ABI_VERSION
from nearflash.abi.errors import WaitTimeoutError
from nearflash.abi.kernel.commands import Command, Completion, GradientFormat, UpdateCommand
from nearflash.abi.kernel.config import UpdateConfig
from nearflash.abi.kernel.config import update_config as named_config
from nearflash.abi.optimizers.state import BLOCK_PARAMS, MasterFormat
from nearflash.abi.python310 import Self
from nearflash.abi.topk import TILE_PARAMS, ValueFormat
from nearflash.device.backends.host.delta import Tiles, round_words, tiles_of, write_delta
from nearflash.device.backends.host.topk import expand
from nearflash.device.backends.host.vector.lane import VectorLane
from nearflash.device.backends.host.vector.state import load_update_loops
from nearflash.device.base import Identity
from nearflash.device.checked import CheckedDevice, port_beats, shares_memory
from nearflash.device.memory import SimulatedMemory
from nearflash.support.threads import set_ieee_arithmetic

__all__ = ["HostDevice"]

THREADS = os.cpu_count() or 1


class HostDevice(CheckedDevice):
    """Runs commands in threads of its own, on memory of the host. Cycles are not modelled.

    It computes every rule, state format and gradient format, whatever the build does.
    """

    QUICK_TO_OPEN = True
    HAS_LINK = False
    DEFAULT_BUILD = "smartssd"
    DEPTH = 16

    def __init__(self, config: UpdateConfig, memory: SimulatedMemory | None = None) -> None:
        load_update_loops()  # what it lacks is named now, not by a thread
        self.memory = memory or SimulatedMemory()
        super().__init__(Identity("host", config, config.digest64, ABI_VERSION, git_revision=0), self.memory)
        self.build = config.in_software()
        self._pool = ThreadPoolExecutor(THREADS, "nearflash-host", initializer=set_ieee_arithmetic)
        self._aborted = threading.Event()
        self._jobs: deque[_Job] = deque()

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
        before = [part for job in self._jobs if shares_memory(job.command, command) for part in job.parts]
        job = _Job(command, self.memory, self._aborted, before)
        job.parts = [self._pool.submit(job.work, part == 0) for part in range(min(THREADS, job.blocks))]
        self._jobs.append(job)

    def _finish(self, timeout_s: float) -> Completion:
        job = self._jobs[0]
        if wait(job.parts, timeout_s).not_done:
            raise WaitTimeoutError(
                f"update of {job.command.params} parameters must end within {timeout_s} s; it still runs"
            )
        self._jobs.popleft()
        counts = [part.result() for part in job.parts]
        delta_bytes = job.write_delta() if job.command.delta else None
        return Completion(
            {
                "params_done": job.command.params,
                "nonfinite_gradients": sum(nonfinite for nonfinite, _ in counts),
                "copy_overflows": sum(overflows for _, overflows in counts),
                **port_beats(job.command, self.identity.config.port_bytes, delta_bytes),
            }
        )

    def _abort(self) -> None:
        self._aborted.set()
        for job in self._jobs:
            wait(job.parts)
        self._jobs.clear()
        self._aborted.clear()


class _Job:
    """A command that threads work on, block by block, once those before it that it shares memory with have ended."""

    def __init__(
        self, command: UpdateCommand, memory: SimulatedMemory, aborted: threading.Event, before: list[Future[Any]]
    ) -> None:
        self.command = command
        self.parts: list[Future[tuple[int, int]]] = []
        self._memory, self._aborted, self._before = memory, aborted, before
        self._gradient: Future[NDArray[Any]] = Future()
        self._tiles: dict[int, Tiles] = {}
        """Of blocks, by their start: what a command for the delta changes."""
        cuts = _cuts(command, VectorLane.BLOCK_PARAMS)
        self.blocks = len(cuts) - 1
        self._left = pairwise(cuts)

    def work(self, first: bool) -> tuple[int, int]:
        """One thread's part; counts as VectorLane.step. The first thread reads the gradient. Raises StreamError."""
        wait(self._before)
        command = self.command
        if first:
            try:
                self._gradient.set_result(self._read_gradient())
            except BaseException as error:  # MemoryError, too: the other threads wait for one or the other
                self._gradient.set_exception(error)
        inputs = self._arrays(command.reads()) | {"g": self._gradient.result()}
        outputs = self._arrays(command.writes())
        lane = VectorLane(command.rule, command.copy, command.master)
        nonfinite = overflows = 0
        for start, stop in self._left:  # shared: a thread that is held up takes fewer blocks
            if self._aborted.is_set():
                break
            part = _part(inputs, start, stop)
            target, old = _part(outputs, start, stop), None
            if command.delta and command.master is MasterFormat.SPLIT:
                old = part["weight"].copy()
                del target["copy"]
            elif command.delta:
                target["copy"], old = np.empty(stop - start, np.uint16), round_words(part["p"], command.copy)
            counts = lane.step(part, target, command.first_param + start, command.gradient_scale)
            if old is not None:
                new = target["weight" if command.master is MasterFormat.SPLIT else "copy"]
                self._tiles[start] = tiles_of(old, new, start // TILE_PARAMS)
            nonfinite, overflows = nonfinite + counts[0], overflows + counts[1]
        return nonfinite, overflows

    def write_delta(self) -> int:
        """After all parts of a command for it: put the delta together; its bytes."""
        command = self.command
        tiles = [tiles for _, tiles in sorted(self._tiles.items())]
        out = self._memory.view(*command.writes()["copy"])
        return write_delta(tiles, command.params, ValueFormat[command.copy.name], out)

    def _read_gradient(self) -> NDArray[Any]:
        stream = self._memory.view(*self.command.reads()["g"])
        if self.command.gradient is GradientFormat.TOPK:
            return expand(stream, self.command.params)
        return stream.view("<u2" if self.command.gradient is GradientFormat.BF16 else "<f4")

    def _arrays(self, ranges: Mapping[str, tuple[int, int]]) -> dict[str, NDArray[Any]]:
        dtypes = {"copy": "<u2", "weight": "<u2", "rest": "<u2", "m_scale": "<u1", "v_scale": "<u1", "p": "<f4"}
        state = {4: "<f4", 2: "<u2", 1: "<u1"}[self.command.rule.state_format.element_bytes]
        return {
            name: self._memory.view(*span).view(dtypes.get(name, state)) for name, span in ranges.items() if name != "g"
        }


def _cuts(command: UpdateCommand, block_params: int) -> list[int]:
    """Bounds of the command's blocks: at multiples of `block_params` of the flat vector, or of the command's delta."""
    first, params = 0 if command.delta else command.first_param, command.params  # a delta's tiles begin with it
    return [0, *range(block_params - first % block_params, params, block_params), params]


def _part(arrays: dict[str, NDArray[Any]], start: int, stop: int) -> dict[str, NDArray[Any]]:
    return {
        name: x[start // BLOCK_PARAMS : stop // BLOCK_PARAMS] if name.endswith("_scale") else x[start:stop]
        for name, x in arrays.items()
    }
