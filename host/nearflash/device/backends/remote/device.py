"""A device whose board is another machine: `pynq:update-pynq-z2@pynq`, or `…@root@pynq`.

ssh starts `nearflash device-server` there and carries its frames; the kernel's identity is read through them, as from a
board here. Commands are checked on this side, and their ranges on both.
"""

import os
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

import numpy as np

from nearflash.abi.errors import AddressError, DeviceError, DigestError
from nearflash.abi.kernel.commands import Command, Completion
from nearflash.abi.kernel.config import KernelConfig
from nearflash.abi.kernel.config import config as named_config
from nearflash.abi.python310 import Self
from nearflash.device.backends.buffers import BoardMemory, OwnedBuffer
from nearflash.device.backends.remote.channel import MAX_PAYLOAD_BYTES, FrameChannel, Json, take_integer
from nearflash.device.backends.remote.server import make_hello
from nearflash.device.base import LinkBytes
from nearflash.device.errors import recall_error
from nearflash.device.memory import anonymous
from nearflash.device.registers import RegisterDevice
from nearflash.support.ssh import ssh_command

__all__ = ["SERVER", "RemoteDevice"]

SERVER = "NEARFLASH_DEVICE_SERVER"
"""Environment variable: the command there, to which the device's name is added."""
_DEFAULT_SERVER = "sudo -n bash -lc 'exec nearflash device-server \"$0\"'"
_ALIVE = ("-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3")
"""A link that is cut ends ssh within half a minute, and with it the wait for a response."""
_END_S = 10.0

Ask = Callable[..., tuple[Json, bytes]]


class RemoteBuffer(OwnedBuffer):
    """A buffer there, and the host's copy of it here. There is no window for direct I/O."""

    def __init__(self, ask: Ask, address: int, size_bytes: int, links: LinkBytes) -> None:
        self._ask, self.address, self.size_bytes, self._links = ask, address, size_bytes, links
        self.host, self.p2p = anonymous(size_bytes), None

    def sync_to_device(self, offset: int = 0, size_bytes: int | None = None) -> None:
        """Send host bytes. Raises AddressError outside the buffer."""
        span = self.span(offset, size_bytes)
        for start in range(span.start, span.stop, MAX_PAYLOAD_BYTES):
            payload = self.host[start : min(start + MAX_PAYLOAD_BYTES, span.stop)]
            self._ask("down", payload.tobytes(), address=self.address, offset=start)
        self._links.to_device += span.stop - span.start

    def sync_from_device(self, offset: int = 0, size_bytes: int | None = None) -> None:
        """Fetch device bytes. Raises AddressError outside the buffer."""
        span = self.span(offset, size_bytes)
        for start in range(span.start, span.stop, MAX_PAYLOAD_BYTES):
            part = self.host[start : min(start + MAX_PAYLOAD_BYTES, span.stop)]
            _, data = self._ask("up", address=self.address, offset=start, size_bytes=part.size)
            if len(data) != part.size:
                raise DeviceError(f"the other end must send {part.size} bytes of a buffer, not {len(data)}")
            part[:] = np.frombuffer(data, np.uint8)
        self._links.from_device += span.stop - span.start

    def release(self) -> None:
        """Free the buffer there."""
        self._ask("free", address=self.address)


class RemoteMemory(BoardMemory):
    """Buffers there."""

    def __init__(self, ask: Ask, size_bytes: int) -> None:
        super().__init__()
        self._ask, self.size_bytes = ask, size_bytes

    def make(self, size_bytes: int, links: LinkBytes) -> RemoteBuffer:
        """A buffer. Raises AddressError where there is no room."""
        response, _ = self._ask("allocate", size_bytes=size_bytes)
        return RemoteBuffer(self._ask, take_integer(response, "address"), size_bytes, links)


class RemoteDevice(RegisterDevice):
    """The device at the other end of a channel, opened there. `card`: the other machine, as in the device's name.

    Raises what opening it raises there, DigestError where the two ends are of different versions.
    """

    def __init__(self, backend: str, config: KernelConfig, channel: FrameChannel, card: str) -> None:
        self._channel = channel
        channel.send(make_hello(config))
        hello = self._receive()[0]
        for name, value in make_hello(config).items():
            if hello.get(name) != value:
                raise DigestError(f"{name} of {card} must be {value}, as here, not {str(hello.get(name))[:80]}")
        self.memory = RemoteMemory(self._ask, take_integer(hello, "memory_bytes"))
        super().__init__(backend, config, self.memory)
        self.identity = replace(self.identity, card=card)
        self.clock_hz, self.clock_run_s = take_integer(hello, "clock_hz"), float(hello.get("clock_run_s", 0))
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def open(cls, config: str) -> Self:
        """A remote device has a machine: see `connect`."""
        raise AddressError(f"a remote device must be named with its machine, device@HOST, not {config!r} alone")

    @classmethod
    def connect(cls, backend: str, config: str, host: str, environment: Mapping[str, str] = os.environ) -> Self:
        """Open `backend:config` on another machine, [USER@]HOST as ssh has it.

        Raises CommandError for a host that is no name and without ssh, DeviceLostError where ssh or the command there
        ends, and what opening the device there raises.
        """
        build = named_config(config)
        command = f"{environment.get(SERVER, _DEFAULT_SERVER)} {backend}:{config}"
        process = subprocess.Popen(ssh_command(host, command, *_ALIVE), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin and process.stdout
        try:
            device = cls(backend, build, FrameChannel(process.stdout, process.stdin, f"`{command}` on {host}"), host)
        except BaseException:
            _end(process)
            raise
        device._process = process
        return device

    def read_register(self, offset: int) -> int:
        """The 32-bit register at a byte offset."""
        return take_integer(self._ask("read", offset=offset)[0], "value", 0xFFFF_FFFF)

    def write_register(self, offset: int, value: int) -> None:
        """Write the 32-bit register at a byte offset."""
        self._ask("write", offset=offset, value=value)

    def pause(self) -> None:
        """Nothing: the other end waits for a command, and a poll of this one takes the time of a request."""

    def reset_kernel(self) -> None:
        """Abort what runs there."""
        self._ask("reset")

    def close(self) -> None:
        """Free all buffers there and end the connection, as far as the other end answers. May be called twice."""
        if self._open:
            with suppress(DeviceError):
                super().close()
                self.memory.close()
            self._open = False
            if self._process:
                _end(self._process)

    def _start(self, command: Command) -> None:
        self._ask("submit", registers=command.registers(), reads=command.reads(), writes=command.writes())

    def _finish(self, timeout_s: float) -> Completion:
        response, _ = self._ask("wait", timeout_s=timeout_s)
        counters = response.get("counters")
        if type(counters) is not dict:
            raise DeviceError("the other end must send the counters of a command, not none")
        self.run_s = float(response.get("run_s", 0))
        return Completion({name: take_integer(counters, name) for name in counters})

    def _ask(self, operation: str, payload: bytes = b"", **fields: object) -> tuple[Json, bytes]:
        self._channel.send({"op": operation, **fields}, payload)
        return self._receive()

    def _receive(self) -> tuple[Json, bytes]:
        """The response. Raises the error that it is."""
        body, data = self._channel.receive()
        if "error" in body:
            raise recall_error(body) or DeviceError(f"the other end failed: {str(body['error'])[:200]}")
        return body, data


def _end(process: subprocess.Popen[bytes]) -> None:
    """Close the pipes and wait for ssh, which ends with the command there."""
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            pipe and pipe.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
