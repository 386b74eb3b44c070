"""Device `bit:CONFIG`: a board's bitstream, decoded from its bits and run cycle by cycle, behind a board's driver.

Opening decodes and compiles on first use (a minute for a small kernel); then the library is in the build cache.
"""

import ctypes
from typing import Self

from nearflash.abi.errors import ConfigError, DeviceError, WaitTimeoutError
from nearflash.abi.kernel.config import KernelConfig
from nearflash.abi.kernel.config import config as named_config
from nearflash.boards.open.decode.library import compile_bitstream
from nearflash.boards.zynq7.system import CONTROL_ADDRESS
from nearflash.device.bitstreams import boards, load_board, load_manifest
from nearflash.device.bitstreams.board import Board
from nearflash.device.memory import SimulatedMemory
from nearflash.device.registers import RegisterDevice
from nearflash.support.native import find_address

__all__ = ["BitstreamDevice"]

_BASE, _SIZE_BYTES = 0x1000_0000, 64 << 20
_QUIET_CYCLES = 100_000
"""Cycles without an end, after which a kernel is asked."""
_WAITS = 3
"""Cycles that the memory lets pass at most between two beats."""


class BitstreamDevice(RegisterDevice):
    """The decoded bitstream of a board's kernel, one at a time in a process.

    open_level: what pins read that nothing drives; seed: of the memory's waits.
    """

    def __init__(self, board: Board, config: KernelConfig, *, open_level: int = 0, seed: int = 1) -> None:
        self._library = ctypes.CDLL(str(compile_bitstream(board, load_manifest(board, config.kernel))))
        self._declare()
        memory = SimulatedMemory(_SIZE_BYTES, base=_BASE)
        self._settings = (find_address(memory.storage), _BASE, _SIZE_BYTES, open_level, _WAITS, seed)
        self._library.nf_reset(*self._settings)
        super().__init__("bit", config, memory)
        self._enable_interrupt()

    @classmethod
    def open(cls, config: str) -> Self:
        """Open the bitstream of the board that has this configuration.

        Raises ConfigError where no board of the open flow has it, BitstreamError where it was not built, ToolsError
        without the flow's programs, FormatError for bits that are no design.
        """
        for board in map(load_board, boards()):
            if config in board.kernels and board.flow == "open":
                return cls(board, named_config(config))
        raise ConfigError(f"config of a bitstream must be one that a board of the open flow has, not {config!r}")

    @property
    def cycles(self) -> int:
        """Clock cycles so far."""
        return int(self._library.nf_cycles())

    @property
    def violations(self) -> int:
        """Bursts that AXI3 forbids, so far."""
        return int(self._library.nf_violations())

    def read_register(self, offset: int) -> int:
        """The 32-bit register at a byte offset. Raises DeviceError where nothing, or an error, comes back."""
        value = int(self._library.nf_read(CONTROL_ADDRESS + offset))
        if value < 0:
            raise DeviceError(
                f"register {offset:#x} must answer, but {'nothing came' if value == -1 else 'an error did'}"
            )
        return value

    def write_register(self, offset: int, value: int) -> None:
        """Write the 32-bit register at a byte offset. Raises DeviceError as `read_register`."""
        if answer := int(self._library.nf_write(CONTROL_ADDRESS + offset, value)):
            raise DeviceError(f"register {offset:#x} must take {value:#x}, but answered {answer}")

    def pause(self) -> None:
        """Run until the interrupt. Raises WaitTimeoutError where none comes for long."""
        for _ in range(100):
            if self._library.nf_run(_QUIET_CYCLES):
                status = self._map["interrupt_status"]
                self.write("interrupt_status", status.pack({"done": 1}))
                return
        raise WaitTimeoutError(f"{self.identity.name} must end, not run on for {100 * _QUIET_CYCLES} cycles")

    def reset_kernel(self) -> None:
        """Configure the part again; its memory stays."""
        self._library.nf_reset(*self._settings)
        self._enable_interrupt()

    def _enable_interrupt(self) -> None:
        self.write("interrupt_mask", self._map["interrupt_mask"].pack({"done": 1}))
        self.write("interrupt_enable", self._map["interrupt_enable"].pack({"enable": 1}))

    def _declare(self) -> None:
        library = self._library
        library.nf_reset.restype, library.nf_read.restype = None, ctypes.c_int64
        library.nf_reset.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int, ctypes.c_uint64,
                                     ctypes.c_uint32]  # fmt: skip
        library.nf_read.argtypes, library.nf_write.argtypes = [ctypes.c_uint32], [ctypes.c_uint32, ctypes.c_uint32]
        library.nf_run.argtypes, library.nf_run.restype = [ctypes.c_uint64], ctypes.c_uint64
        library.nf_cycles.restype = library.nf_violations.restype = ctypes.c_uint64
