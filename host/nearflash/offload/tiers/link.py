"""Memory of what computes, and the way to it, which counts what it moves: a GPU's copies go on a stream of their own.

A CPU's memory is the host's, and nothing crosses; or, for tests of what would, a memory of its own beside the host's.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor

from nearflash.storage.io.backend import BLOCK_BYTES
from nearflash.storage.io.direct import aligned_buffer

__all__ = ["DeviceLink", "Spans", "StagedBuffer", "host_memory"]

Spans: TypeAlias = Sequence[tuple[int, int]]
"""Parts of a memory, in bytes, half open."""


def host_memory(size_bytes: int, pinned: bool = False) -> Tensor:
    """Bytes of the host, (size_bytes,) uint8, at a page's start; pinned for copies to a GPU."""
    if pinned:
        memory = torch.empty(size_bytes + BLOCK_BYTES, dtype=torch.uint8, pin_memory=True)
        return memory[-memory.data_ptr() % BLOCK_BYTES :][:size_bytes]
    return torch.from_numpy(aligned_buffer(max(size_bytes, 1))[:size_bytes])


class DeviceLink:
    """Copies between the host's memory and that of a device of torch, the far one.

    count: told of each copy its link, `weights host to gpu` for example, and its bytes. one_memory: the far memory is
    the host's, so that there is nothing to copy; None: of a CPU it is. False there: a memory of its own, as a GPU's.
    """

    def __init__(
        self, device: str = "cpu", count: Callable[[str, int], None] = lambda link, size_bytes: None, *,
        one_memory: bool | None = None,
    ) -> None:  # fmt: skip
        self.device, self._count = torch.device(device), count
        is_cpu = self.device.type == "cpu"
        self.one_memory = is_cpu if one_memory is None else one_memory
        self._stream: Any = None if is_cpu else torch.cuda.Stream(self.device)
        self._asides: Any = None if is_cpu else torch.cuda.Stream(self.device)

    def host_memory(self, size_bytes: int) -> Tensor:
        """Memory of the host, (size_bytes,) uint8, which copies over the link are fastest with."""
        return host_memory(size_bytes, pinned=self._stream is not None)

    def far_memory(self, size_bytes: int) -> Tensor:
        """Memory of the device, (size_bytes,) uint8."""
        return host_memory(size_bytes) if self._stream is None else torch.empty(
            size_bytes, dtype=torch.uint8, device=self.device
        )  # fmt: skip

    def buffer(self, size_bytes: int, staged_bytes: int | None = None) -> "StagedBuffer":
        """Memory of the device, with a staging buffer of the host where that is another memory; None: as large."""
        far = self.far_memory(size_bytes)
        staged_bytes = size_bytes if staged_bytes is None else staged_bytes
        return StagedBuffer(far, far if self.one_memory else self.host_memory(staged_bytes))

    @contextmanager
    def filling(self, buffer: "StagedBuffer") -> Iterator[None]:
        """Have what is copied to a buffer's far memory, or computed there, inside of the block go on beside other work;
        `before_use` waits for it.
        """
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            yield
            if self._stream is not None:
                buffer.pushed = self._stream.record_event()

    def mark(self) -> Any:
        """An event after all that the device was given to compute so far, for `aside`; None of a CPU."""
        return None if self._stream is None else torch.cuda.current_stream(self.device).record_event()

    @contextmanager
    def aside(self, mark: Any) -> Iterator[None]:
        """Have copies inside of the block wait for a mark, and for no other work or copies; they are done when it ends.
        What they read and write was in the far memory at the mark.
        """
        with nullcontext() if self._asides is None else torch.cuda.stream(self._asides):
            if self._asides is not None:
                self._asides.wait_event(mark)
            yield
            if self._asides is not None:
                self._asides.synchronize()

    def push(self, what: str, host: Tensor, far: Tensor, spans: Spans | None = None) -> None:
        """Begin to copy (n,) uint8 of the host to the far memory, in `filling` or `aside`: these spans alone, or all,
        of any shape.
        """
        self._copy(f"{what} host to gpu", host, far, spans)

    def pull(self, what: str, far: Tensor, host: Tensor, spans: Spans | None = None) -> None:
        """Copy (n,) uint8 of the far memory to the host's: these spans, or all, of any shape; there when it returns."""
        self._copy(f"{what} gpu to host", far, host, spans)
        if self._stream is not None:
            torch.cuda.current_stream(self.device).synchronize()

    def place(self, what: str, value: Tensor) -> Tensor:
        """The host's tensor in the far memory."""
        if self.one_memory:
            return value
        self._count(f"{what} host to gpu", value.nbytes)
        return value.to(self.device, copy=True)

    def before_use(self, buffer: "StagedBuffer") -> None:
        """Let what is computed from here on see what was pushed."""
        if buffer.pushed is not None:
            torch.cuda.current_stream(self.device).wait_event(buffer.pushed)

    def after_use(self, buffer: "StagedBuffer") -> None:
        """Let what was computed up to here be done with the buffer before it is filled again."""
        if self._stream is not None:
            buffer.used = torch.cuda.current_stream(self.device).record_event()

    def before_fill(self, buffer: "StagedBuffer") -> None:
        """Wait until the buffer may be overwritten."""
        for event in (buffer.pushed, buffer.used):
            if event is not None:
                event.synchronize()
        buffer.pushed = buffer.used = None

    def finish(self) -> None:
        """Wait for all that was begun; times mean something then."""
        if self._stream is not None:
            torch.cuda.synchronize(self.device)

    def _copy(self, link: str, source: Tensor, target: Tensor, spans: Spans | None) -> None:
        """Copy and count. In one memory bytes may have another place, but they do not cross."""
        if source.data_ptr() == target.data_ptr():
            return
        parts = [(source, target)]
        if spans is not None:
            parts = [(source[first:last], target[first:last]) for first, last in _join_neighbours(spans)]
        for part, place in parts:
            # Others pass through a buffer of torch's.
            place.copy_(part, non_blocking=part.is_contiguous() and place.is_contiguous())
            if not self.one_memory:
                self._count(link, part.nbytes)


def _join_neighbours(spans: Spans) -> Spans:
    """Spans in their order, those that touch as one: each is a copy."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if joined and first == joined[-1][1]:
            first = joined.pop()[0]
        joined.append((first, last))
    return joined


class StagedBuffer:
    """The device's bytes and the host's, (n,) uint8 each; the same tensor where there is one memory."""

    def __init__(self, memory: Tensor, host: Tensor) -> None:
        self.memory, self.host = memory, host
        self.pushed: Any = None
        self.used: Any = None
