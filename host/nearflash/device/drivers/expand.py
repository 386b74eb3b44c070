"""Bitmap matrices on a device of the expand kernel, and what its devices in software share."""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.bitmap import HEADER_BYTES, BitmapHeader, bitmap_error
from nearflash.abi.kernel.commands import Command, Completion
from nearflash.abi.kernel.config import ExpandConfig, expand_config
from nearflash.abi.kernel.expand import ExpandCommand
from nearflash.abi.python310 import Self
from nearflash.abi.topk import StreamFault
from nearflash.device.base import Device
from nearflash.device.checked import port_beats
from nearflash.device.immediate import ImmediateDevice
from nearflash.device.memory import SimulatedMemory

__all__ = ["Expanded", "SoftwareExpandDevice", "expand_command", "expand_matrix"]


@dataclass(frozen=True)
class Expanded:
    """Outcome of a matrix."""

    dense: NDArray[Any]
    """Bit patterns, uint16 or uint8, (rows, columns)."""
    counters: dict[str, int]


def expand_command(header: BitmapHeader, in_address: int, out_address: int) -> ExpandCommand:
    """The command for the matrix of that header, which lies in `stream_bytes` bytes at `in_address`."""
    shape = (header.rows, header.columns, header.element, header.coding, header.output)
    return ExpandCommand(in_address, header.stream_bytes, out_address, *shape)


def expand_matrix(device: Device, stream: bytes) -> Expanded:
    """Expand a matrix in buffers of its own.

    Raises StreamError for a matrix that is damaged, and what the device raises.
    """
    command = expand_command(BitmapHeader.unpack(stream[:HEADER_BYTES], len(stream)), 0, 0)
    source, target = device.allocate(len(stream)), device.allocate(command.out_bytes)
    try:
        source.host[:] = np.frombuffer(stream, np.uint8)
        source.sync_to_device()
        counters = device.run(replace(command, in_address=source.address, out_address=target.address)).counters
        target.sync_from_device()
        dtype = f"<u{command.dense.number_format.bytes}"
        rows = target.host.reshape(command.rows, command.row_bytes).view(dtype)
        return Expanded(rows[:, : command.columns].copy(), counters)
    finally:
        device.free(source)
        device.free(target)


class SoftwareExpandDevice(ImmediateDevice):
    """Expands every format and rows of any length, whatever the build does. A backend adds `_expand`."""

    BACKEND: ClassVar[str]

    def __init__(self, config: ExpandConfig, memory: SimulatedMemory | None = None) -> None:
        super().__init__(self.BACKEND, config, memory)
        self.build = config.in_software()

    @classmethod
    def open(cls, config: str) -> Self:
        """Open with the build configuration of that name. Raises ConfigError."""
        return cls(expand_config(config))

    @abstractmethod
    def _expand(self, stream: NDArray[np.uint8], out: NDArray[np.uint8]) -> int:
        """Write the dense rows to the beginnings of those of `out`; returns the number of values. Raises StreamError.

        out: (rows, bytes of a row with its padding), contiguous; the padding stays as it is.
        """

    def _run(self, command: Command) -> Completion:
        assert isinstance(command, ExpandCommand)
        stream = self.memory.view(*command.reads()["matrix"])
        header = BitmapHeader.unpack(stream[:HEADER_BYTES].tobytes(), stream.size)
        if not command.expects(header):
            raise bitmap_error(StreamFault.HEADER, f"{header}")
        out = self.memory.view(*command.writes()["dense"]).reshape(command.rows, command.row_bytes)
        values = self._expand(stream, out)
        out[:, command.columns * command.dense.number_format.bytes :] = 0
        return Completion(
            {
                "rows_done": command.rows,
                "elements_done": command.rows * command.columns,
                "values_done": values,
                **port_beats(command, self.identity.config.port_bytes),
            }
        )
