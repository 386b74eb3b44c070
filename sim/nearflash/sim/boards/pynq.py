"""A `pynq.Device` over a Verilated kernel: PYNQ's own Overlay, MMIO, allocate and clocks run on it.

Registers at the kernel's base address are the kernel's; others, such as those of the processing system, keep what was
written to them. Needs the package pynq, in a virtual environment of its own (`make test-boards`).
"""

from pathlib import Path
from typing import Any

import pynq
import pynq.ps
from pynq.buffer import PynqBuffer
from pynq.metadata.runtime_metadata_parser import RuntimeMetadataParser
from pynqmetadata.frontends import Metadata

from nearflash.abi.config import KernelConfig
from nearflash.abi.errors import AddressError
from nearflash.abi.registers import REGISTER_MAPS
from nearflash.device.base import LinkBytes
from nearflash.device.memory import SimulatedBuffer
from nearflash.sim.boards.kernel import BoardKernel

__all__ = ["BASE_ADDRESS", "SimulatedBoard"]

BASE_ADDRESS = 0x4000_0000
"""Of the kernel's registers: the first of M_AXI_GP0."""
_WORD_BYTES = 4
_PLLS = {0xF800_0100: 40 << 12, 0xF800_0104: 32 << 12, 0xF800_0108: 20 << 12}
"""System-level control registers of a Zynq-7000: multipliers of the ARM, DDR and I/O PLLs (UG585, B.28)."""


class SimulatedBoard(pynq.Device):
    """A Zynq-7000 board whose logic is the kernel of `config`, once its bitstream was downloaded.

    `denied` makes every access to memory fail as for a user that is not root.
    """

    _probe_priority_ = 50

    def __init__(self, config: KernelConfig) -> None:
        super().__init__("simulated")
        self.name, self.arch, self.config = "Simulated-Z2", pynq.ps.ZYNQ_ARCH, config
        self.capabilities = {"REGISTER_RW": True}
        self.kernel: BoardKernel | None = None
        self.timestamp = ""
        self.words = dict(_PLLS)
        self.denied = False
        self.default_memory = _Memory(self)

    @classmethod
    def _probe_(cls) -> list[Any]:
        """Boards are made by name, not found."""
        return []

    def install(self) -> None:
        """Be PYNQ's active device, on a machine that PYNQ takes for a Zynq-7000."""
        pynq.ps.CPU_ARCH = pynq.ps.ZYNQ_ARCH
        pynq.Device.active_device = self
        if hasattr(pynq.ps.Clocks, "_real_instance"):
            del pynq.ps.Clocks._real_instance  # that of another board

    def close(self) -> None:
        """Free the simulator."""
        if self.kernel:
            self.kernel.close()

    def get_bitfile_metadata(self, bitfile_name: str, partial: bool = False) -> Any:
        """What PYNQ reads of the .hwh beside a bitstream."""
        return RuntimeMetadataParser(Metadata(input=Path(bitfile_name).with_suffix(".hwh")))

    def download(self, bitstream: Any, parser: Any = None) -> None:
        """Configure the logic: from here on the kernel is there."""
        if self.denied:
            raise OSError("Root permissions required.")
        self.kernel = self.kernel or BoardKernel(self.config)
        self.post_download(bitstream, parser)

    def read_registers(self, address: int, length: int) -> bytes:
        """Bytes of 32-bit registers from a physical address on."""
        words = (self._read(address + at) for at in range(0, length, _WORD_BYTES))
        return b"".join(word.to_bytes(_WORD_BYTES, "little") for word in words)

    def write_registers(self, address: int, data: Any) -> None:
        """Write 32-bit registers from a physical address on."""
        for at in range(0, len(data), _WORD_BYTES):
            value = int.from_bytes(bytes(data[at : at + _WORD_BYTES]), "little")
            offset = self._offset(address + at)
            if offset is None or self.kernel is None:
                self.words[address + at] = value
            else:
                self.kernel.write(offset, value)

    def flush(self, *_: object) -> None:
        """The mapping is not cached."""

    def invalidate(self, *_: object) -> None:
        """The mapping is not cached."""

    def _read(self, address: int) -> int:
        offset = self._offset(address)
        return self.words.get(address, 0) if offset is None or self.kernel is None else self.kernel.read(offset)

    def _offset(self, address: int) -> int | None:
        """Of a register of the kernel."""
        size = REGISTER_MAPS[self.config.kernel].size_bytes
        return address - BASE_ADDRESS if BASE_ADDRESS <= address < BASE_ADDRESS + size else None


class _Memory:
    """The contiguous memory of the board's Linux."""

    def __init__(self, board: SimulatedBoard) -> None:
        self._board = board
        self._buffers: dict[int, SimulatedBuffer] = {}

    def allocate(self, shape: tuple[int, ...], dtype: str, **_: object) -> Any:
        if self._board.kernel is None:
            raise RuntimeError("Overlay is not downloaded")
        try:
            buffer = self._board.kernel.memory.allocate(shape[0], LinkBytes())
        except AddressError as full:
            raise RuntimeError(f"Allocate failed: {full}") from full
        array = PynqBuffer(shape, dtype, buffer=buffer.p2p, device=self._board, device_address=buffer.address)
        # As PYNQ's own cache of buffers: freeing gives the pointer back to `return_to`.
        array.memory, array.pointer, array.return_to = self, buffer.address, self
        self._buffers[buffer.address] = buffer
        return array

    def return_pointer(self, address: int) -> None:
        assert self._board.kernel is not None
        self._board.kernel.memory.free(self._buffers.pop(address))
