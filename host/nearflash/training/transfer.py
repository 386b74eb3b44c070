"""One extent at a time between flash, device memory and host.

    flash --p, m, v--> device: update in place in its memory --p', m', v'--> the spare slot on flash
    host  --gradients--> device --parameters or their copy--> host

p, m and v go by direct I/O into the device's p2p window; where a device has none they pass through host memory and
are then counted on the host link as well. One extent after another: an overlapped schedule can replace this class.
"""

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.commands import CopyFormat, UpdateCommand
from nearflash.abi.formats import FP32
from nearflash.abi.rules import OptimizerStep
from nearflash.device import Buffer, Device
from nearflash.storage import ARRAYS, Extent, StateFile, aligned_buffer
from nearflash.training.traffic import Traffic

__all__ = ["Transfer"]

TIMEOUT_S = 600.0
"""For one extent: a board needs milliseconds, a simulated kernel on a busy machine a minute."""


class Transfer:
    """Device buffers for one extent. Positions are parameters from the extent's start, multiples of 16."""

    def __init__(self, device: Device, state: StateFile, traffic: Traffic) -> None:
        self._device, self._state, self._traffic = device, state, traffic
        size_bytes = max(extent.size_bytes for extent in state.manifest.extents)
        # A copy needs half the bytes, but at the positions of fp32 its ranges stay aligned to the widest port.
        self._buffers: dict[str, Buffer] = {name: device.allocate(size_bytes) for name in ("g", *ARRAYS, "copy")}
        self._staging = aligned_buffer(size_bytes)

    def close(self) -> None:
        """Give the device memory back."""
        for buffer in self._buffers.values():
            self._device.free(buffer)
        self._buffers = {}

    def load(self, extent: Extent) -> None:
        """Bring p, m and v of the current slot into device memory. Raises StateError for damaged data."""
        for array in ARRAYS:
            buffer, memory = self._window(array, extent)
            self._state.read(array, extent, memory)
            self._traffic.flash_read_bytes += extent.size_bytes
            if buffer.p2p is None:
                buffer.host[: extent.size_bytes] = memory
                self._down(buffer, 0, extent.size_bytes)

    def store(self, extent: Extent) -> None:
        """Write p, m and v to the spare slot. Raises StorageFullError, StateError."""
        for array in ARRAYS:
            buffer, memory = self._window(array, extent)
            if buffer.p2p is None:
                self._up(buffer, 0, extent.size_bytes)
                memory[:] = buffer.host[: extent.size_bytes]
            self._state.write(array, extent, memory)
            self._traffic.flash_written_bytes += extent.size_bytes

    def gradients(self, start: int, stop: int) -> NDArray[np.float32]:
        """Where to put the gradients of positions [start, stop), fp32, before `update`."""
        return self._host("g").view(np.float32)[start:stop]

    def update(self, rule: OptimizerStep, start: int, stop: int, copy: CopyFormat) -> NDArray[np.uint8]:
        """Update positions [start, stop); returns the new parameters' bytes (fp32, or in the copy's format).

        The result is valid until the next call. Raises DeviceError, WaitTimeoutError.
        """
        offset, params = start * FP32.bytes, stop - start
        self._down(self._buffers["g"], offset, params * FP32.bytes)
        at = {name: buffer.address + offset for name, buffer in self._buffers.items()}
        inputs = {name: at[name] for name in ("g", "p", *rule.arrays)}
        outputs = {name: at[name] for name in ("p", *rule.arrays, "copy")}
        command = UpdateCommand(rule, params, inputs, outputs, copy)
        self._traffic.add_counters(self._device.run(command, TIMEOUT_S).counters)
        self._traffic.params += params
        number_format = copy.number_format or FP32
        name, size_bytes = "copy" if copy else "p", params * number_format.bytes
        self._up(self._buffers[name], offset, size_bytes)
        return self._host(name)[offset : offset + size_bytes]

    def _host(self, name: str) -> NDArray[np.uint8]:
        return self._buffers[name].host

    def _window(self, array: str, extent: Extent) -> tuple[Buffer, NDArray[np.uint8]]:
        buffer = self._buffers[array]
        memory = self._staging if buffer.p2p is None else buffer.p2p
        return buffer, memory[: extent.size_bytes]

    def _down(self, buffer: Buffer, offset: int, size_bytes: int) -> None:
        before = self._device.links.to_device
        buffer.sync_to_device(offset, size_bytes)
        self._traffic.to_device_bytes += self._device.links.to_device - before

    def _up(self, buffer: Buffer, offset: int, size_bytes: int) -> None:
        before = self._device.links.from_device
        buffer.sync_from_device(offset, size_bytes)
        self._traffic.from_device_bytes += self._device.links.from_device - before
