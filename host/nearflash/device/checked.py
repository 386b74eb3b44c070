"""Common part of every backend: buffers, the checks before a command starts, and tickets."""

from abc import abstractmethod
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from nearflash.abi.errors import AddressError, CommandError, DeviceError
from nearflash.abi.kernel.commands import Command, Completion
from nearflash.abi.topk import HEADER_BYTES
from nearflash.device.base import Buffer, Device, Identity, LinkBytes
from nearflash.device.memory import Memory

__all__ = ["CheckedDevice", "check_ranges", "port_beats", "shares_memory"]


class _Range(NamedTuple):
    """Bytes [start, end) of device memory."""

    start: int
    end: int
    name: str


def check_ranges(command: Command, buffers: Iterable[Buffer], memory_bytes: int) -> None:
    """Raise AddressError unless every range lies in one allocated buffer and no output damages another range.

    An output may be the same range as an input (update in place); any other overlap is an error. Ranges are sorted, as
    a batch of heads has thousands.
    """
    reads, writes = _ranges(command.reads(), "read"), _ranges(command.writes(), "write")
    allocated = sorted((b.address, b.address + b.size_bytes) for b in buffers)
    for access in reads + writes:
        position = bisect_right(allocated, access.start, key=lambda buffer: buffer[0]) - 1
        if position < 0 or access.end > allocated[position][1]:
            raise AddressError(
                f"{access.name} range must lie in one allocated buffer of the device's {memory_bytes} bytes of memory, "
                f"not [{access.start:#x}, {access.end:#x})"
            )
    for access, other in pairwise(writes):
        if other.start < access.end:
            raise _overlap(access, other)
    for read in reads:
        # The writes lie apart, so that their ends ascend too, and one that is the same range is the only one there.
        position = bisect_right(writes, read.start, key=lambda write: write.end)
        if position < len(writes) and read[:2] != writes[position][:2] and writes[position].start < read.end:
            raise _overlap(writes[position], read)


def shares_memory(one: Command, other: Command) -> bool:
    """Whether a command writes what the other reads or writes, so that their order counts."""
    first, second = (_ranges(command.reads(), "read") for command in (one, other))
    writes, rewrites = (_ranges(command.writes(), "write") for command in (one, other))
    return _meet(writes, second + rewrites) or _meet(first, rewrites)


def _meet(one: Iterable[_Range], other: Sequence[_Range]) -> bool:
    return any(a.start < b.end and b.start < a.end for a in one for b in other)


def _ranges(ranges: Mapping[str, tuple[int, int]], what: str) -> list[_Range]:
    """Check ranges by address."""
    return sorted(_Range(start, start + size, f"{name} {what}") for name, (start, size) in ranges.items())


def _overlap(one: _Range, other: _Range) -> AddressError:
    return AddressError(
        f"{one.name} range must be apart from the {other.name} range (or be the same, for an update in place), "
        f"not [{one.start:#x}, {one.end:#x}) over [{other.start:#x}, {other.end:#x})"
    )


def port_beats(command: Command, port_bytes: int, delta_bytes: int | None = None) -> dict[str, int]:
    """Counters `read_beats` and `write_beats`, as they follow from a command's ranges.

    delta_bytes: of the delta that was written in the copy's range, which is for the longest. Its header is written
    last: where it does not fill beats, the one that it shares with the first tile is written twice.
    """
    sizes = {
        "read_beats": {name: size for name, (_, size) in command.reads().items()},
        "write_beats": {name: size for name, (_, size) in command.writes().items()},
    }
    if delta_bytes is not None:
        sizes["write_beats"]["copy"] = delta_bytes + (port_bytes if HEADER_BYTES % port_bytes else 0)
    return {name: sum(-(-size // port_bytes) for size in each.values()) for name, each in sizes.items()}


class CheckedDevice(Device):
    """A device that runs one command at a time, in the order of submits, which come from one thread.

    A backend adds `_start`, `_finish` and `_abort`. `build` is the configuration that commands are checked against.
    """

    def __init__(self, identity: Identity, memory: Memory) -> None:
        self.identity, self.build = identity, identity.config
        self.links = LinkBytes()
        self._memory = memory
        self._buffers: dict[int, Buffer] = {}
        self._last_ticket = 0
        self._running: deque[int] = deque()
        self._ended: dict[int, Completion | DeviceError] = {}
        self._open = True

    @abstractmethod
    def _start(self, command: Command) -> None:
        """Start a checked command; fewer than DEPTH others are in flight."""

    @abstractmethod
    def _finish(self, timeout_s: float) -> Completion:
        """Wait for the oldest command. Raises DeviceError (it has ended), WaitTimeoutError (it is still in flight)."""

    @abstractmethod
    def _abort(self) -> None:
        """Stop all that runs or waits and return to idle."""

    @property
    def memory_bytes(self) -> int:
        """Size of the device's memory."""
        return self._memory.size_bytes

    def allocate(self, size_bytes: int) -> Buffer:
        """A page-aligned buffer. Raises AddressError when the memory is full."""
        self._require_open()
        buffer = self._memory.allocate(size_bytes, self.links)
        self._buffers[buffer.address] = buffer
        return buffer

    def free(self, buffer: Buffer) -> None:
        """Give the buffer's memory back. Raises AddressError for one that is not allocated here."""
        self._memory.free(buffer)
        del self._buffers[buffer.address]

    def submit(self, command: Command) -> int:
        """Check and start a command. Raises CommandError, AlignmentError, AddressError before anything started."""
        self._require_open()
        command.check(self.build)
        check_ranges(command, self._buffers.values(), self._memory.size_bytes)
        if len(self._running) == self.DEPTH:
            self._retire_oldest(timeout_s=60.0)
        self._start(command)
        self._last_ticket += 1
        self._running.append(self._last_ticket)
        return self._last_ticket

    def wait(self, ticket: int, timeout_s: float = 60.0) -> Completion:
        """Block until the command has ended. Raises DeviceError, WaitTimeoutError."""
        while ticket in self._running:
            self._retire_oldest(timeout_s)
        if ticket not in self._ended:
            raise CommandError(f"ticket must be one that was submitted and not yet waited for, not {ticket!r}")
        ended = self._ended.pop(ticket)
        if isinstance(ended, DeviceError):
            raise ended
        return ended

    def reset(self) -> None:
        """Abort what runs; its tickets are void. Memory contents stay."""
        self._abort()
        self._running.clear()

    def close(self) -> None:
        """Abort what runs and release the device; may be called twice."""
        if self._open:
            self.reset()
            self._open = False

    def _retire_oldest(self, timeout_s: float) -> None:
        ticket = self._running[0]
        try:
            self._ended[ticket] = self._finish(timeout_s)
        except DeviceError as fault:
            self._ended[ticket] = fault
        self._running.popleft()

    def _require_open(self) -> None:
        if not self._open:
            raise DeviceError(f"device {self.identity.name} must be open, not closed; open it with open_device()")
