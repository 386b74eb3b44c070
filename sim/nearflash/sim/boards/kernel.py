"""A Verilated kernel as a board has it: registers by 32-bit word, time that goes on between two polls."""

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.config import KernelConfig
from nearflash.abi.registers import REGISTER_MAPS
from nearflash.device.memory import SimulatedMemory
from nearflash.sim.verilator.device import kernel_design, nand_model
from nearflash.sim.verilator.kernel import KernelLibrary

__all__ = ["POLL_CYCLES", "BoardKernel"]

POLL_CYCLES = 2000
"""Cycles that pass before a poll of the control word."""
_ALL_ONES = 0xFFFF_FFFF


class BoardKernel:
    """The kernel of a build, and the memory that it reaches.

    `unplugged` may be set at any time: reads then give all ones, writes do nothing, as on a bus where nobody answers.
    """

    def __init__(self, config: KernelConfig, memory_bytes: int = 1 << 30) -> None:
        self.kernel = KernelLibrary(
            kernel_design(config), config.full_name, memory_bytes=memory_bytes, nand=nand_model(config)
        )
        self.memory = SimulatedMemory(base=self.kernel.base_address, storage=self.kernel.memory)
        self._control = REGISTER_MAPS[config.kernel]["control"].offset
        self.unplugged = False

    def read(self, offset: int) -> int:
        """The 32-bit register at a byte offset."""
        if self.unplugged:
            return _ALL_ONES
        if offset == self._control:
            self.kernel.advance(POLL_CYCLES, until_interrupt=True)
        return self.kernel.read_register(offset)

    def write(self, offset: int, value: int) -> None:
        """Write the 32-bit register at a byte offset."""
        if not self.unplugged:
            self.kernel.write_register(offset, value)

    def view(self, address: int, size_bytes: int) -> NDArray[np.uint8]:
        """Bytes of the memory at [address, address + size_bytes)."""
        return self.memory.view(address, size_bytes)

    def close(self) -> None:
        """Free the simulator."""
        self.kernel.close()
