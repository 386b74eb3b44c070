"""What is equal on every backend: buffers, the checks before a command starts, and tickets."""

from abc import abstractmethod
from collections.abc import Iterable
from itertools import combinations, product

from nearflash.abi.commands import Command, Completion
from nearflash.abi.errors import AddressError, CommandError, DeviceError
from nearflash.device.base import Buffer, Device, Identity, LinkBytes
from nearflash.device.memory import Memory

__all__ = ["CheckedDevice", "check_ranges", "port_beats"]

Range = tuple[int, int]


def check_ranges(command: Command, buffers: Iterable[Buffer], memory_bytes: int) -> None:
    """Raise AddressError unless every range lies in one allocated buffer and no output damages another range.

    An output may be the same range as an input (update in place); any other overlap is refused.
    """
    reads = [(f"{name} read", r) for name, r in command.reads().items()]
    writes = [(f"{name} write", r) for name, r in command.writes().items()]
    allocated = [(b.address, b.size_bytes) for b in buffers]
    for name, (address, size) in reads + writes:
        if not any(start <= address and address + size <= start + room for start, room in allocated):
            raise AddressError(
                f"{name} range must lie in one allocated buffer of the device's {memory_bytes} bytes of memory, "
                f"not [{address:#x}, {address + size:#x})"
            )
    pairs = [(a, b, a[1] == b[1]) for a, b in product(writes, reads)]
    pairs += [(a, b, False) for a, b in combinations(writes, 2)]
    for (name, one), (other_name, other), in_place in pairs:
        if not in_place and _overlap(one, other):
            raise AddressError(
                f"{name} range must be apart from the {other_name} range (or be the same, for an update in place), "
                f"not [{one[0]:#x}, {sum(one):#x}) over [{other[0]:#x}, {sum(other):#x})"
            )


def _overlap(one: Range, other: Range) -> bool:
    return one[0] < sum(other) and other[0] < sum(one)


def port_beats(command: Command, port_bytes: int) -> dict[str, int]:
    """Counters `read_beats` and `write_beats`, as they follow from a command's ranges."""
    beats = {"read_beats": command.reads(), "write_beats": command.writes()}
    return {name: sum(-(-size // port_bytes) for _, size in ranges.values()) for name, ranges in beats.items()}


class CheckedDevice(Device):
    """A device that runs one command at a time; a second submit waits for the first.

    A backend adds `_start`, `_finish` and `_abort`.
    """

    def __init__(self, identity: Identity, memory: Memory) -> None:
        self.identity = identity
        self.links = LinkBytes()
        self._memory = memory
        self._buffers: dict[int, Buffer] = {}
        self._last_ticket = 0
        self._running: int | None = None
        self._ended: dict[int, Completion | DeviceError] = {}
        self._open = True

    @abstractmethod
    def _start(self, command: Command) -> None:
        """Start a checked command on the idle device."""

    @abstractmethod
    def _finish(self, timeout_s: float) -> Completion:
        """Wait for the command that runs. Raises DeviceError (it has ended), WaitTimeoutError (it still runs)."""

    @abstractmethod
    def _abort(self) -> None:
        """Stop what runs and return to idle."""

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
        command.check(self.identity.config)
        check_ranges(command, self._buffers.values(), self._memory.size_bytes)
        if self._running is not None:
            self._retire(self._running, timeout_s=60.0)
        self._start(command)
        self._last_ticket += 1
        self._running = self._last_ticket
        return self._last_ticket

    def wait(self, ticket: int, timeout_s: float = 60.0) -> Completion:
        """Block until the command has ended. Raises DeviceError, WaitTimeoutError."""
        if ticket == self._running:
            self._retire(ticket, timeout_s)
        if ticket not in self._ended:
            raise CommandError(f"ticket must be one that was submitted and not yet waited for, not {ticket!r}")
        ended = self._ended.pop(ticket)
        if isinstance(ended, DeviceError):
            raise ended
        return ended

    def reset(self) -> None:
        """Abort what runs; its ticket is void. Memory contents stay."""
        self._abort()
        self._running = None

    def close(self) -> None:
        """Abort what runs and release the device; may be called twice."""
        if self._open:
            self.reset()
            self._open = False

    def _retire(self, ticket: int, timeout_s: float) -> None:
        try:
            self._ended[ticket] = self._finish(timeout_s)
        except DeviceError as fault:
            self._ended[ticket] = fault
        self._running = None

    def _require_open(self) -> None:
        if not self._open:
            raise DeviceError(f"device {self.identity.name} must be open, not closed; open it with open_device()")
