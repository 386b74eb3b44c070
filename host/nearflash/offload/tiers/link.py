"""Memory of what computes, and the way to it: a GPU's copies on a stream of their own; a CPU's memory is the host's."""

from typing import Any

import torch
from torch import Tensor

from nearflash.storage.io.backend import BLOCK_BYTES
from nearflash.storage.io.direct import aligned_buffer

__all__ = ["DeviceLink", "StagedBuffer", "host_memory"]


def host_memory(size_bytes: int, pinned: bool = False) -> Tensor:
    """Bytes of the host, (size_bytes,) uint8, at a page's start; pinned for copies to a GPU."""
    if pinned:
        memory = torch.empty(size_bytes + BLOCK_BYTES, dtype=torch.uint8, pin_memory=True)
        return memory[-memory.data_ptr() % BLOCK_BYTES :][:size_bytes]
    return torch.from_numpy(aligned_buffer(max(size_bytes, 1))[:size_bytes])


class DeviceLink:
    """Copies between the host and a device of torch. Of a CPU there is nothing to copy."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.is_cpu = self.device.type == "cpu"
        self._stream: Any = None if self.is_cpu else torch.cuda.Stream(self.device)

    def buffer(self, size_bytes: int) -> "StagedBuffer":
        """Memory of the device, with a staging buffer of the host where that is another."""
        host = host_memory(size_bytes, pinned=not self.is_cpu)
        return StagedBuffer(
            host if self.is_cpu else torch.empty(size_bytes, dtype=torch.uint8, device=self.device), host
        )

    def push(self, buffer: "StagedBuffer") -> None:
        """Begin to copy a buffer from the host's side to the device's."""
        if self.is_cpu:
            return
        with torch.cuda.stream(self._stream):
            buffer.memory.copy_(buffer.host, non_blocking=True)
            buffer.pushed = self._stream.record_event()

    def before_use(self, buffer: "StagedBuffer") -> None:
        """Let what is computed from here on see what was pushed."""
        if buffer.pushed is not None:
            torch.cuda.current_stream(self.device).wait_event(buffer.pushed)

    def after_use(self, buffer: "StagedBuffer") -> None:
        """Let what was computed up to here be done with the buffer before it is filled again."""
        if not self.is_cpu:
            buffer.used = torch.cuda.current_stream(self.device).record_event()

    def before_fill(self, buffer: "StagedBuffer") -> None:
        """Wait until the buffer may be overwritten."""
        for event in (buffer.pushed, buffer.used):
            if event is not None:
                event.synchronize()
        buffer.pushed = buffer.used = None

    def finish(self) -> None:
        """Wait for all that was begun; times mean something then."""
        if not self.is_cpu:
            torch.cuda.synchronize(self.device)


class StagedBuffer:
    """The device's bytes and the host's, (n,) uint8 each; the same tensor on a CPU."""

    def __init__(self, memory: Tensor, host: Tensor) -> None:
        self.memory, self.host = memory, host
        self.pushed: Any = None
        self.used: Any = None
