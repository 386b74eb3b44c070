"""Device `hls`: the update kernels of the folder hls/, compiled with g++, behind the same driver as a board.

A kernel is built at the first command that needs it (seconds) and taken from the build cache after. Cycles are not
modelled.
"""

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Self

import numpy as np

from nearflash.abi import ABI_VERSION
from nearflash.abi.delta import DeltaHeader
from nearflash.abi.errors import WaitTimeoutError
from nearflash.abi.formats import fp32_bits
from nearflash.abi.kernel.commands import Command, Completion, GradientFormat, UpdateCommand
from nearflash.abi.kernel.config import UpdateConfig
from nearflash.abi.kernel.config import update_config as named_config
from nearflash.abi.optimizers import OPTIMIZERS, MasterFormat
from nearflash.abi.topk import HEADER_BYTES, StreamFault, stream_error
from nearflash.device.base import Identity
from nearflash.device.checked import CheckedDevice, port_beats
from nearflash.device.memory import SimulatedMemory
from nearflash.sim.hls.build import include_path
from nearflash.sim.hls.kernels import HlsCall, HlsKernel, call_of
from nearflash.sim.hls.library import HlsLibrary
from nearflash.sim.hls.rule import HlsRule

__all__ = ["HlsDevice"]


class HlsDevice(CheckedDevice):
    """The threaded simulation of the HLS kernels with the lanes and ports of `config`.

    rules: optimizers of the user's own that commands may name beside the shipped ones.
    real: scalar type of the lanes: float, or Fp32, the integers that are synthesised.
    """

    QUICK_TO_OPEN = True
    DEPTH = 4

    def __init__(
        self,
        config: UpdateConfig,
        memory: SimulatedMemory | None = None,
        *,
        rules: Iterable[type[HlsRule]] = (),
        real: str = "float",
    ) -> None:
        include_path()
        self.memory = memory or SimulatedMemory()
        super().__init__(Identity("hls", config, config.digest64, ABI_VERSION, git_revision=0), self.memory)
        optimizers = (*OPTIMIZERS, *(rule.optimizer for rule in rules))
        self.build = replace(config, optimizers=optimizers, gradients=("fp32", "topk"), state_formats=("fp32",),
                             delta=config.delta and len(config.masters) == 1)  # fmt: skip
        self._config, self._real = config, real
        self._libraries: dict[HlsKernel, HlsLibrary] = {}
        self._thread = ThreadPoolExecutor(1, "nearflash-hls")
        self._work: deque[Future[Completion]] = deque()

    @classmethod
    def open(cls, config: str) -> Self:
        """Open with the build configuration of that name. Raises ConfigError, CompileError outside a checkout."""
        return cls(named_config(config))

    def close(self) -> None:
        """Wait for what runs and end the thread; may be called twice."""
        super().close()
        self._thread.shutdown()

    def _start(self, command: Command) -> None:
        assert isinstance(command, UpdateCommand)
        call = call_of(command.rule)
        topk = command.gradient is GradientFormat.TOPK
        split = command.master is MasterFormat.SPLIT
        call = replace(call, kernel=replace(call.kernel, topk=topk, delta=command.delta, split=split))
        if call.kernel not in self._libraries:
            self._libraries[call.kernel] = call.kernel.library(self._config, self._real)
        self._work.append(self._thread.submit(self._run, self._libraries[call.kernel], command, call))

    def _finish(self, timeout_s: float) -> Completion:
        oldest = self._work[0]
        if wait([oldest], timeout_s).not_done:
            raise WaitTimeoutError(f"an update must end within {timeout_s} s; it still runs")
        self._work.popleft()
        return oldest.result()

    def _abort(self) -> None:
        """A kernel that runs cannot be stopped: wait for it."""
        wait([work for work in self._work if not work.cancel()])
        self._work.clear()

    def _run(self, library: HlsLibrary, command: UpdateCommand, call: HlsCall) -> Completion:
        kernel, results = call.kernel, np.zeros(2 + call.kernel.topk, np.uint32)
        library.run([
            *(self._host_address(command.inputs[name]) for name in ("g", *kernel.ports)),
            *(self._host_address(command.outputs[name]) for name in kernel.ports),
            *([] if kernel.split else [self._host_address(command.outputs["copy"]) if command.copy else 0]),
            *([command.gradient_bytes] if kernel.topk else []), command.params,
            *([] if kernel.split else [command.copy]),
            *(fp32_bits(call.scalars[name]) for name in kernel.scalars),
            *(int(address) for address in results.ctypes.data + results.itemsize * np.arange(results.size)),
        ])  # fmt: skip
        *fault, nonfinite, overflows = results.tolist()
        if kernel.topk and fault[0]:
            raise stream_error(StreamFault(fault[0]), "one that the kernel found to be damaged")
        return Completion({
            "params_done": command.params, "nonfinite_gradients": nonfinite, "copy_overflows": overflows,
            **port_beats(command, self._config.port_bytes, self._delta_bytes(command) if command.delta else None),
        })  # fmt: skip

    def _delta_bytes(self, command: UpdateCommand) -> int:
        """Bytes of the delta that a command has written."""
        first = command.outputs["copy"] - self.memory.base
        return DeltaHeader.size_in(self.memory.storage[first : first + HEADER_BYTES].tobytes())

    def _host_address(self, address: int) -> int:
        return int(self.memory.storage.ctypes.data) + address - self.memory.base
