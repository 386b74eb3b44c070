"""The board's end: requests of a channel, done on a device of this machine.

Buffers, commands and registers are those of `nearflash.device.base`; a command comes as its registers' values and the
ranges that it reads and writes, which the device compares with the buffers as it does for a caller here.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nearflash.abi import ABI_VERSION
from nearflash.abi.errors import AddressError, CommandError, DeviceError, DeviceLostError, DigestError, NearflashError
from nearflash.abi.fields import Access
from nearflash.abi.kernel.config import KernelConfig
from nearflash.device.backends.remote.channel import MAX_PAYLOAD_BYTES, FrameChannel, Json, take_integer
from nearflash.device.base import Buffer
from nearflash.device.errors import describe_error
from nearflash.device.registers import RegisterDevice

__all__ = ["VERSION", "make_hello", "serve"]

VERSION = 1
"""Of the protocol."""
_MAX_WAIT_S = 1e6
_Ranges = dict[str, tuple[int, int]]


def make_hello(config: KernelConfig) -> Json:
    """The facts that both ends must have in common."""
    return {"version": VERSION, "abi": ABI_VERSION, "config": config.full_name, "digest": config.digest}


def serve(channel: FrameChannel, config: KernelConfig, open_it: Callable[[], RegisterDevice]) -> None:
    """Open the device and do what is asked of it until the channel ends; the device is closed then.

    An error of the device is a response, by its name; what is wrong with a frame ends the service.
    """
    try:
        _check_hello(channel.receive()[0], config)
        device = open_it()
    except NearflashError as error:
        channel.send(describe_error(error))
        return
    with device:
        channel.send(
            make_hello(config)
            | {"memory_bytes": device.memory_bytes, "clock_hz": device.clock_hz, "clock_run_s": device.clock_run_s}
        )
        session = _Session(device)
        while True:
            try:
                body, payload = channel.receive()
            except DeviceLostError:
                return
            try:
                response, data = session.do(body, payload)
            except NearflashError as error:
                response, data = describe_error(error), b""
            except Exception as failure:
                channel.send({"error": ["DeviceError", f"the other end failed, and ends: {failure!r}"]})
                raise
            channel.send(response, data)


def _check_hello(body: Json, config: KernelConfig) -> None:
    for name, value in make_hello(config).items():
        if body.get(name) != value:
            raise DigestError(
                f"{name} of the machine that asks must be {value}, as here, not {str(body.get(name))[:80]}: "
                "install the same nearflash on both"
            )


@dataclass(frozen=True)
class _RemoteCommand:
    """A command that the other end has checked: its registers, and what it reads and writes."""

    kernel: str
    values: dict[str, int]
    read_ranges: _Ranges
    write_ranges: _Ranges

    def reads(self) -> _Ranges:
        return self.read_ranges

    def writes(self) -> _Ranges:
        return self.write_ranges

    def check(self, config: KernelConfig) -> None:
        """Raise CommandError for registers that are no arguments of the kernel, or values that have no room there."""
        registers = config.registers
        known = {register.name: register for register in registers if register.access is Access.RW}
        for name, value in self.values.items():
            if name not in known or type(value) is not int or not 0 <= value < 1 << known[name].width_bits:
                raise CommandError(f"arguments of {config.full_name} must fit its registers, not {name}: {value!r}")

    def registers(self) -> dict[str, int]:
        return self.values


class _Session:
    """The device's buffers and its command, as one client sees them."""

    def __init__(self, device: RegisterDevice) -> None:
        self._device = device
        self._buffers: dict[int, Buffer] = {}
        self._ticket = 0
        self._known = {
            register.offset + at
            for register in device.identity.config.registers
            for at in range(0, register.width_bits // 8, 4)
        }

    def do(self, body: Json, payload: bytes) -> tuple[Json, bytes]:
        """The response to a request. Raises what the device raises, DeviceError for a request that is none."""
        operation = body.get("op")
        if operation == "up":
            return {}, self._up(body)
        if operation == "down":
            return self._down(body, payload), b""
        known: dict[Any, Callable[[Json], Json]] = {
            "read": self._read, "write": self._write, "allocate": self._allocate, "free": self._free,
            "submit": self._submit, "wait": self._wait, "reset": self._reset,
        }  # fmt: skip
        if type(operation) is not str or operation not in known:
            raise DeviceError(f"op must be one of {', '.join(known)}, up, down, not {str(operation)[:40]!r}")
        return known[operation](body), b""

    def _register(self, body: Json) -> int:
        offset = take_integer(body, "offset")
        if offset not in self._known:
            raise AddressError(f"a register's offset must be one of the kernel's, not {offset:#x}")
        return offset

    def _read(self, body: Json) -> Json:
        return {"value": self._device.read_register(self._register(body))}

    def _write(self, body: Json) -> Json:
        self._device.write_register(self._register(body), take_integer(body, "value", 0xFFFF_FFFF))
        return {}

    def _allocate(self, body: Json) -> Json:
        buffer = self._device.allocate(take_integer(body, "size_bytes"))
        self._buffers[buffer.address] = buffer
        return {"address": buffer.address}

    def _buffer(self, body: Json) -> Buffer:
        address = take_integer(body, "address")
        if address not in self._buffers:
            raise AddressError(f"a buffer must be allocated, not at {address:#x}")
        return self._buffers[address]

    def _free(self, body: Json) -> Json:
        buffer = self._buffer(body)
        self._device.free(buffer)
        del self._buffers[buffer.address]
        return {}

    def _down(self, body: Json, payload: bytes) -> Json:
        buffer, offset = self._buffer(body), take_integer(body, "offset")
        buffer.host[buffer.span(offset, len(payload))] = np.frombuffer(payload, np.uint8)
        buffer.sync_to_device(offset, len(payload))
        return {}

    def _up(self, body: Json) -> bytes:
        buffer, offset = self._buffer(body), take_integer(body, "offset")
        size_bytes = take_integer(body, "size_bytes", MAX_PAYLOAD_BYTES)
        buffer.sync_from_device(offset, size_bytes)
        return buffer.host[offset : offset + size_bytes].tobytes()

    def _submit(self, body: Json) -> Json:
        values, kernel = body.get("registers"), self._device.identity.config.kernel
        if type(values) is not dict:
            raise DeviceError("registers of a frame must be an object of names and values")
        command = _RemoteCommand(kernel, values, _take_ranges(body, "reads"), _take_ranges(body, "writes"))
        self._ticket = self._device.submit(command)  # type: ignore[arg-type]
        return {}

    def _wait(self, body: Json) -> Json:
        timeout_s = body.get("timeout_s")
        if not isinstance(timeout_s, int | float) or not 0 <= timeout_s < math.inf:
            raise DeviceError(f"timeout_s of a frame must be a number of at least 0, not {str(timeout_s)[:40]!r}")
        done = self._device.wait(self._ticket, min(float(timeout_s), _MAX_WAIT_S))
        return {"counters": done.counters, "run_s": self._device.run_s}

    def _reset(self, _: Json) -> Json:
        self._device.reset()
        return {}


def _take_ranges(body: Json, name: str) -> _Ranges:
    """Ranges of a command by name: address and bytes."""
    ranges = body.get(name)
    if type(ranges) is not dict or any(type(pair) is not list or len(pair) != 2 for pair in ranges.values()):
        raise DeviceError(f"{name} of a frame must be an object of addresses and sizes")
    taken = {}
    for key, pair in ranges.items():
        address, size = (take_integer({key: value}, key) for value in pair)
        taken[key] = (address, size)
    return taken
