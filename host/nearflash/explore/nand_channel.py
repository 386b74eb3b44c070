"""A NAND channel event by event: the controller's requests, LUNs, bus cycles and waits. Times are its clock cycles.

    ask ─► queue ─► table of requests ─► a queue for each LUN ─► bus: sense, status, column change, data ─► done

The controller looks for LUNs one a clock; one that wants a command goes before a page that is ready; while a column
change settles, other LUNs get theirs. Pages are read in the order in which they were found in their registers. What it
counts is what `nearflash.gateware.nand` does, whose simulated cycles it is compared with.
Limits: pages of one LUN, no cache reads, no programs or erases, no cells slower than tR, nothing that holds the data
but the lanes behind the link. Source: ONFI 4.2; the controller's docstrings.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, replace
from functools import partial

from nearflash.abi.attention.codeword import RAW_BYTES
from nearflash.abi.nand import NandTiming

__all__ = ["Channel", "ChannelTiming", "Clock", "Request", "channel_cycles"]

_BEAT_BYTES = 8
_READ_CYCLES, _SELECT_CYCLES, _COLUMN_CYCLES = 7, 7, 4
"""Bus cycles of a command with column and row, and of one with a column."""
_CHOOSE, _RECORD = 2, 1
"""Clocks from a LUN found to its command, and from the command's end to its new record."""
_OPEN, _NAME, _NEXT, _CLOSE = 4, 2, 2, 3
"""Clocks from a page chosen to its mask, from a run to its column change, from data to the run or page after them."""


class Clock:
    """Events in the order of their times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Do something at a time."""
        self._count += 1
        heapq.heappush(self._events, (time, self._count, action))

    def run(self) -> None:
        """Until nothing is left to do."""
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()


@dataclass(frozen=True)
class ChannelTiming:
    """A part's times in clocks of a build. tick: clocks between two looks at the time; a wait takes one more."""

    timing: NandTiming
    clock_hz: int
    tick: int = 16

    def clocks(self, time_ns: int) -> int:
        """That last at least so long."""
        return NandTiming.cycles(time_ns, self.clock_hz)

    @property
    def command(self) -> int:
        """A command or address cycle on the bus."""
        return self.clocks(self.timing.command_ns)

    @property
    def sense_ticks(self) -> int:
        """From a READ to the look at its status."""
        return -(-self.clocks(self.timing.read_ns) // self.tick) + 1

    @property
    def status(self) -> int:
        """The status command, tWHR, and its one beat."""
        return 2 * self.command + self.clocks(self.timing.whr_ns) + 2

    @property
    def settle(self) -> int:
        """tCCS."""
        return self.clocks(self.timing.ccs_ns)

    @property
    def free(self) -> int:
        """tRHW."""
        return self.clocks(self.timing.rhw_ns)

    def data(self, codewords: float) -> float:
        """A burst."""
        beat = max(1.0, _BEAT_BYTES / self.timing.link_bytes_per_s * self.clock_hz)
        return self.clocks(self.timing.preamble_ns) + codewords * RAW_BYTES / _BEAT_BYTES * beat


@dataclass
class Request:
    """A page to be read in part; `done` is called when its last beat has passed the lanes. channel: for the caller."""

    channel: int
    lun: int
    codewords: float
    runs: int = 1
    """Of neighbouring codewords: one column change each."""
    lane_cycles: float = 0.0
    done: Callable[[], None] = lambda: None
    initial: bool = False
    """The first one of an index block."""
    scan: int = 0
    """Place behind the first run in the mask of codewords, which is looked through one a clock; 0: its size."""


class _Lun:
    """Pages asked for, and what it does: from when it wants a command (inf: it senses nothing, or holds a page)."""

    def __init__(self) -> None:
        self.waiting: deque[Request] = deque()
        self.sensing = False
        self.wants = math.inf


class Channel:
    """Controller, bus, LUNs and lanes of one channel.

    queued: requests in front of the controller's table of `requests`, of which `lun_requests` may be of one LUN.
    """

    def __init__(
        self, clock: Clock, timing: ChannelTiming, luns: int, *, queued: int = 32, requests: int = 32,
        lun_requests: int = 8,
    ) -> None:  # fmt: skip
        self._clock, self._timing, self._queued = clock, timing, queued
        self._requests, self._lun_requests = requests, lun_requests
        self._luns = [_Lun() for _ in range(luns)]
        self._queue: deque[Request] = deque()
        self._held = 0
        self._ready: deque[Request] = deque()
        self._wait: deque[Callable[[], None]] = deque()
        self._scan = (0.0, 0)
        """A time, and the LUN that is looked at then."""
        self._free = self._lanes_free = 0.0
        self._idle, self._turn = True, 0
        self._bus = self._serve()
        self._taken_until = 0.0
        self.link_cycles = self.data_cycles = self.lane_cycles = 0.0
        """In which the link is taken, waits of ONFI included; those of bursts alone; those of the lanes."""

    @property
    def full(self) -> bool:
        """Whether there is no place for a request."""
        return len(self._queue) >= self._queued

    def when_free(self, action: Callable[[], None]) -> None:
        """Call `action` once, when a request has left the queue."""
        self._wait.append(action)

    def ask(self, request: Request) -> None:
        """Read a page."""
        self._queue.append(request)
        self._enter()

    def _enter(self) -> None:
        """Requests enter in their order: one whose LUN has no place holds back those behind it."""
        while self._queue and self._held < self._requests:
            lun = self._luns[self._queue[0].lun]
            if len(lun.waiting) >= self._lun_requests:
                return
            lun.waiting.append(self._queue.popleft())
            self._held += 1
            if len(lun.waiting) == 1:
                lun.wants = self._clock.now + 2
            if self._idle:
                self._go_on_at(self._clock.now)
            if self._wait:
                self._wait.popleft()()

    def _go_on_at(self, time: float) -> None:
        self._turn += 1
        turn = self._turn
        self._clock.at(time, lambda: self._go_on(turn))

    def _go_on(self, turn: int) -> None:
        if turn == self._turn:
            self._idle = False
            time = next(self._bus)
            if time < math.inf:
                self._go_on_at(time)

    def _found(self) -> tuple[float, int]:
        """When the scan comes to a LUN that wants a command, and to which."""
        since, at = self._scan
        count = len(self._luns)
        found = (math.inf, 0)
        for number, lun in enumerate(self._luns):
            if lun.wants < math.inf:
                begin = max(since, math.ceil(lun.wants))
                found = min(found, (begin + (number - at - int(begin - since)) % count + 1, number))
        return found

    def _serve(self) -> Generator[float, None, None]:
        """The bus: gives the time at which it goes on."""
        while True:
            time, number = self._found()
            if time <= self._clock.now:
                yield from self._command(number)
            elif self._ready:
                yield from self._read(self._ready.popleft())
            else:
                self._idle = True
                yield time

    def _taken(self, begin: float, end: float) -> None:
        """The link is taken, by another wait too perhaps."""
        self.link_cycles += max(0.0, end - max(begin, self._taken_until))
        self._taken_until = max(end, self._taken_until)

    def _command(self, number: int) -> Generator[float, None, None]:
        """READ, or the status of a page that has been sensed."""
        lun, timing = self._luns[number], self._timing
        begin = max(self._clock.now + _CHOOSE, self._free)
        end = begin + (timing.status if lun.sensing else _READ_CYCLES * timing.command)
        self._taken(begin, end)
        if lun.sensing:
            self._free = end + timing.free
            self._taken(end, self._free)
            self._ready.append(lun.waiting[0])
            lun.sensing, lun.wants = False, math.inf
        else:
            lun.sensing = True
            lun.wants = (int(end) // timing.tick + timing.sense_ticks) * timing.tick
        self._scan = (end + _RECORD, (number + 1) % len(self._luns))
        yield end + _RECORD

    def _read(self, request: Request) -> Generator[float, None, None]:
        """Run after run: its column change, other LUNs while that settles, its data."""
        timing, lun = self._timing, self._luns[request.lun]
        codewords = request.codewords / request.runs
        scan, data = request.scan or math.ceil(codewords), timing.data(codewords)
        begin, reads = self._clock.now + _OPEN + scan, 0.0
        for run in range(request.runs):
            begin = max(begin + _NAME, self._free)
            settled = begin + timing.command * (_COLUMN_CYCLES if run else _SELECT_CYCLES)
            self._taken(begin, settled)
            yield settled
            settled += timing.settle
            while (found := self._found())[0] < settled:
                yield max(found[0], self._clock.now)
                yield from self._command(found[1])
                if self._clock.now >= settled:
                    break
            begin = max(settled, self._clock.now) + 1
            reads = reads or begin
            end = begin + data
            self._free = end + timing.free
            self._taken(settled - timing.settle, self._free)
            self.data_cycles += data
            begin = end + _NEXT
        self._lanes_free = max(end, max(reads, self._lanes_free) + request.lane_cycles)
        self.lane_cycles += request.lane_cycles
        yield max(end, self._lanes_free) + _CLOSE
        self._close(request, lun)

    def _close(self, request: Request, lun: _Lun) -> None:
        """The page leaves its LUN's register."""
        lun.waiting.popleft()
        lun.wants = self._clock.now if lun.waiting else math.inf
        self._held -= 1
        self._enter()
        request.done()


def channel_cycles(requests: Iterable[Request], timing: ChannelTiming, luns: int) -> float:
    """Clocks until the last of the requests is through, each asked for as soon as there is a place for it."""
    clock, last = Clock(), 0.0
    channel, left = Channel(clock, timing, luns), iter(requests)

    def ask() -> None:
        for request in left:
            channel.ask(replace(request, done=partial(ended, request.done)))
            if channel.full:
                channel.when_free(ask)
                return

    def ended(done: Callable[[], None]) -> None:
        nonlocal last
        last = clock.now
        done()

    ask()
    clock.run()
    return last
