"""Bitmap matrices and coded weights on a device of the expand kernel, and what its devices in software share."""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.bitmap import HEADER_BYTES, BitmapHeader, bitmap_error
from nearflash.abi.coded import CODED_MAGIC, CodedHeader
from nearflash.abi.kernel.commands import Command, Completion
from nearflash.abi.kernel.config import ExpandConfig, expand_config
from nearflash.abi.kernel.expand import CodedCommand, ExpandCommand
from nearflash.abi.python310 import Self
from nearflash.abi.topk import StreamFault
from nearflash.device.base import Device
from nearflash.device.checked import port_beats
from nearflash.device.immediate import ImmediateDevice
from nearflash.device.memory import SimulatedMemory

__all__ = [
    "Expanded",
    "SoftwareExpandDevice",
    "dense_elements",
    "expand_command",
    "expand_matrix",
    "stream_header",
]


@dataclass(frozen=True)
class Expanded:
    """Outcome of a matrix."""

    dense: NDArray[Any]
    """Bit patterns, uint16 or uint8, (rows, columns); of coded weights (elements,)."""
    counters: dict[str, int]


def stream_header(text: bytes, stream_bytes: int) -> BitmapHeader | CodedHeader:
    """Header of a matrix or of coded weights, as its magic says. Raises StreamError."""
    kind = CodedHeader if text[: len(CODED_MAGIC)] == CODED_MAGIC else BitmapHeader
    return kind.unpack(text[:HEADER_BYTES], stream_bytes)


def expand_command(
    header: BitmapHeader | CodedHeader, in_address: int, out_address: int
) -> ExpandCommand | CodedCommand:
    """The command for the stream of that header, which lies in `stream_bytes` bytes at `in_address`."""
    if isinstance(header, CodedHeader):
        sizes = header.elements, header.block_elements, header.element
        return CodedCommand(in_address, header.stream_bytes, out_address, *sizes)
    shape = (header.rows, header.columns, header.element, header.coding, header.output)
    return ExpandCommand(in_address, header.stream_bytes, out_address, *shape)


def dense_elements(command: ExpandCommand | CodedCommand, out: NDArray[np.uint8]) -> NDArray[Any]:
    """The elements among the padded rows that a command wrote, a copy where there is padding between them.

    out: (out_bytes,). Returns patterns (rows, columns), or (elements,) of coded weights.
    """
    patterns = out.view(f"<u{command.dense.number_format.bytes}")
    if isinstance(command, ExpandCommand):
        return patterns.reshape(command.rows, -1)[:, : command.columns]
    row, size = command.row_bytes // 2, command.block_elements
    parts = [patterns[at * row : at * row + size] for at in range(command.blocks)] if row != size else [patterns]
    return np.concatenate(parts)[: command.elements] if len(parts) > 1 else parts[0][: command.elements]


def expand_matrix(device: Device, stream: bytes) -> Expanded:
    """Expand a matrix or coded weights in buffers of its own.

    Raises StreamError for a stream that is damaged, and what the device raises.
    """
    command = expand_command(stream_header(stream, len(stream)), 0, 0)
    source, target = device.allocate(len(stream)), device.allocate(command.out_bytes)
    try:
        source.host[:] = np.frombuffer(stream, np.uint8)
        source.sync_to_device()
        counters = device.run(replace(command, in_address=source.address, out_address=target.address)).counters
        target.sync_from_device()
        return Expanded(dense_elements(command, target.host).copy(), counters)
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

    @abstractmethod
    def _expand_coded(self, stream: NDArray[np.uint8], out: NDArray[np.uint16]) -> int:
        """Write the elements of coded weights to `out`; returns the number of values. Raises StreamError."""

    def _run(self, command: Command) -> Completion:
        assert isinstance(command, ExpandCommand | CodedCommand)
        stream = self.memory.view(*command.reads()["matrix"])
        kind = CodedHeader if isinstance(command, CodedCommand) else BitmapHeader
        header = kind.unpack(stream[:HEADER_BYTES].tobytes(), stream.size)
        if not command.expects(header):  # type: ignore[arg-type]
            raise bitmap_error(StreamFault.HEADER, f"{header}", header.what)
        if isinstance(command, CodedCommand):
            rows, elements, values = command.blocks, command.elements, self._run_coded(command, stream)
        else:
            rows, elements, values = command.rows, command.rows * command.columns, self._run_matrix(command, stream)
        beats = port_beats(command, self.identity.config.port_bytes)
        return Completion({"rows_done": rows, "elements_done": elements, "values_done": values, **beats})

    def _run_coded(self, command: CodedCommand, stream: NDArray[np.uint8]) -> int:
        """Dense blocks with their padding, where it is between them."""
        out, dense = self.memory.view(*command.writes()["dense"]), np.empty(command.elements, np.uint16)
        values = self._expand_coded(stream, dense)
        out[:] = 0
        for at in range(command.blocks):
            block = dense[at * command.block_elements :][: command.block_elements].view(np.uint8)
            out[at * command.row_bytes :][: block.size] = block
        return values

    def _run_matrix(self, command: ExpandCommand, stream: NDArray[np.uint8]) -> int:
        out = self.memory.view(*command.writes()["dense"]).reshape(command.rows, command.row_bytes)
        values = self._expand(stream, out)
        out[:, command.columns * command.dense.number_format.bytes :] = 0
        return values
