"""Compressed weights expanded beside the drive that they lie on: their stored bytes never cross the host's link.

    file on the drive ──direct I/O, P2P──► device's memory ──expand kernel──► dense rows ──link──► host

Of a matrix the host reads the header and the groups' ends through the window, to know that it is the tensor's; the
kernel checks each group's CRC32C.
"""

import threading
from collections.abc import Callable, Iterable
from typing import Any

from numpy.typing import NDArray

from nearflash.abi.bitmap import HEADER_BYTES
from nearflash.abi.errors import FormatError, NearflashError, StreamError
from nearflash.device import Device, open_device
from nearflash.device.base import Buffer
from nearflash.device.drivers.expand import dense_elements, expand_command, stream_header
from nearflash.storage.io.backend import BLOCK_BYTES
from nearflash.weights.expand import unpack_header
from nearflash.weights.file import WeightsTensor

__all__ = ["DeviceExpander"]


class DeviceExpander:
    """An expand device that reads tensors from its own drive; any thread may ask. Close it.

    device: a name for `open_device`, or an open device, which stays open. count: is told which link carried how many
    bytes: `weights disk to device` by P2P, `weights device to host` the dense rows; where the device has no P2P window,
    `weights disk to host` and `weights host to device`.
    """

    def __init__(self, device: str | Device, count: Callable[[str, int], None] = lambda link, size_bytes: None) -> None:
        self._opened = open_device(device, "expand") if isinstance(device, str) else None
        self.device: Device = device if isinstance(device, Device) else self._opened  # type: ignore[assignment]
        self._count, self._lock = count, threading.Lock()
        self._buffers: dict[str, Buffer] = {}

    def check(self, tensors: Iterable[WeightsTensor]) -> None:
        """Raise FormatError or CommandError, with the tensor's name, for one that the device does not expand.

        Dense tensors are read by the host.
        """
        for tensor in tensors:
            if tensor.form == "dense":
                continue
            if tensor.form not in ("bitmap", "coded"):
                raise FormatError(
                    f"tensor {tensor.name!r} must be a bitmap matrix or coded to be expanded by "
                    f"{self.device.identity.name}, not of form {tensor.form}: compress it so "
                    "(nearflash compress --format coded-bitmap), or leave the device out"
                )
            try:
                text = tensor.file.read(tensor.offset, HEADER_BYTES).tobytes()
                command = expand_command(stream_header(text, tensor.stored_bytes), tensor.offset % BLOCK_BYTES, 0)
                command.check(getattr(self.device, "build", self.device.identity.config))
            except OSError as error:
                raise tensor.error(f"reading failed ({error.strerror})") from error
            except StreamError as error:
                raise tensor.error(error) from error
            except NearflashError as error:
                raise type(error)(
                    f"tensor {tensor.name!r}: {error}; compress it so, or leave the device out"
                ) from error

    def expand(self, tensor: WeightsTensor, out: NDArray[Any]) -> None:
        """Fill `out`, contiguous, with the dense tensor. Raises WeightsError, or StreamError, for a damaged tensor."""
        device, before = self.device, tensor.offset % BLOCK_BYTES
        with self._lock:
            room = -(-(before + tensor.stored_bytes) // BLOCK_BYTES) * BLOCK_BYTES
            source = self._room("stored", room)
            memory = source.host if source.p2p is None else source.p2p
            data = tensor.load(lambda size_bytes: memory[:size_bytes])
            tensor.check(data)
            header = unpack_header(tensor, data)
            target = self._room("dense", expand_command(header, 0, 0).out_bytes)
            if source.p2p is None:
                source.sync_to_device(0, room)
                self._count("weights disk to host", tensor.stored_bytes)
                self._count("weights host to device", room)
            else:
                self._count("weights disk to device", tensor.stored_bytes)
            command = expand_command(header, source.address + before, target.address)
            device.run(command)
            target.sync_from_device(0, command.out_bytes)
            self._count("weights device to host", command.out_bytes)
            found = dense_elements(command, target.host[: command.out_bytes])
            out.view(found.dtype).reshape(found.shape)[...] = found

    def close(self) -> None:
        """Free its buffers, close the device that it opened; may be called twice."""
        with self._lock:
            while self._buffers:
                self.device.free(self._buffers.popitem()[1])
            if self._opened is not None:
                self._opened.close()

    def _room(self, name: str, size_bytes: int) -> Buffer:
        """The buffer of that name, with so many bytes at least."""
        held = self._buffers.get(name)
        if held is None or held.size_bytes < size_bytes:
            if held is not None:
                self.device.free(self._buffers.pop(name))
            held = self._buffers[name] = self.device.allocate(size_bytes)
        return held
