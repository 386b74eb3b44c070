"""Device `verilator`: the kernel's gateware, cycle by cycle, behind the same driver as a board.

Opening builds the simulator on first use (a minute for a large configuration) and takes it from the build cache after.
"""

from typing import Self

from nearflash.abi.errors import ConfigError, WaitTimeoutError
from nearflash.abi.kernel.commands import Completion
from nearflash.abi.kernel.config import AttendConfig, KernelConfig
from nearflash.abi.kernel.config import config as named_config
from nearflash.boards.design.kernels import kernel_of
from nearflash.device.memory import DEFAULT_BYTES, SimulatedMemory
from nearflash.device.registers import RegisterDevice
from nearflash.sim.nand.channel import NandModel
from nearflash.sim.nand.parts import nand_part, nand_parts
from nearflash.sim.verilator.kernel import KernelLibrary, MemoryModel
from nearflash.sim.verilog import Design, load_design

__all__ = ["VerilatorDevice", "kernel_design", "nand_model"]

#: A kernel that moves no data for so long, and for the time of an erase, will never move any.
QUIET_CYCLES = 100_000


def kernel_design(config: KernelConfig) -> Design:
    """The kernel that `config` describes, converted once for all processes."""
    return load_design(f"{config.full_name}-{config.digest[:16]}", lambda: kernel_of(config))


def nand_model(config: KernelConfig) -> NandModel | None:
    """NAND behind the kernel, without bit errors: a part with timing and page of `config`; None where it has no luns.

    Raises ConfigError where no part fits.
    """
    if not isinstance(config, AttendConfig) or not config.luns:
        return None
    for part in map(nand_part, nand_parts()):
        if part.timing == config.nand and part.page_bytes == config.page_bytes:
            return NandModel(part, config.luns, config.clock_hz)
    raise ConfigError(f"some NAND part must have the timing and the page of {config.full_name}, not none")


class VerilatorDevice(RegisterDevice):
    """The simulated kernel of `config`.

    `kernel` is the simulator: memory model, NAND channels, statistics, cycles; waves for a device made with `trace`.
    `nand` is what lies behind a kernel with NAND LUNs, by default what `nand_model` says.

    Raises BuildError (see nearflash.sim.verilator.build) where the simulator cannot be built.
    """

    def __init__(
        self,
        config: KernelConfig,
        *,
        memory_bytes: int = DEFAULT_BYTES,
        model: MemoryModel | None = None,
        nand: NandModel | None = None,
        trace: bool = False,
    ) -> None:
        self.kernel = KernelLibrary(
            kernel_design(config),
            config.full_name,
            memory_bytes=memory_bytes,
            model=model,
            nand=nand or nand_model(config),
            trace=trace,
        )
        memory = SimulatedMemory(base=self.kernel.base_address, storage=self.kernel.memory)
        super().__init__("verilator", config, memory)
        self._quiet_cycles = QUIET_CYCLES
        if isinstance(config, AttendConfig) and config.luns:
            self._quiet_cycles += config.nand.cycles(config.nand.erase_ns, config.clock_hz)
        self._enable_interrupt()

    @classmethod
    def open(cls, config: str) -> Self:
        """Open with the build configuration of that name. Raises ConfigError, BuildError."""
        return cls(named_config(config))

    def close(self) -> None:
        """Release the simulator; buffers keep their bytes. May be called twice."""
        super().close()
        self.kernel.close()

    def read_register(self, offset: int) -> int:
        """The 32-bit register at a byte offset."""
        return self.kernel.read_register(offset)

    def write_register(self, offset: int, value: int) -> None:
        """Write the 32-bit register at a byte offset."""
        self.kernel.write_register(offset, value)

    def pause(self) -> None:
        """Run until the interrupt, or for as long as a kernel may be quiet.

        Raises WaitTimeoutError, naming what waits, when no data moved in all that time.
        """
        before = self._count_moved()
        self.kernel.advance(self._quiet_cycles, until_interrupt=True)
        if not self.kernel.interrupt and self._count_moved() == before:
            raise WaitTimeoutError(
                f"{self.identity.name} must move data or end, not stand still for {self._quiet_cycles} cycles: "
                f"{self.kernel.waits_text()}; reset the device"
            )

    def reset_kernel(self) -> None:
        """Reset the kernel and what the memory ports had in flight."""
        self.kernel.reset()
        self._enable_interrupt()

    def _finish(self, timeout_s: float) -> Completion:
        try:
            return super()._finish(timeout_s)
        finally:
            if self.kernel.interrupt:
                status = self._map["interrupt_status"]
                self.write("interrupt_status", status.pack({"done": 1}))

    def _waiting_streams(self) -> str:
        return self.kernel.waits_text()

    def _count_moved(self) -> int:
        memory = sum(port.read_bytes + port.written_bytes for port in self.kernel.statistics().values())
        return memory + sum(channel.statistics().data_cycles for channel in self.kernel.channels)

    def _enable_interrupt(self) -> None:
        self.write("interrupt_mask", self._map["interrupt_mask"].pack({"done": 1}))
        self.write("interrupt_enable", self._map["interrupt_enable"].pack({"enable": 1}))
