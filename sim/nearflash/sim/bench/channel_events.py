"""Events of a NAND channel: luns sense, one link transfers, the lanes behind it work. Times are clock cycles."""

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from nearflash.abi.attention.codeword import RAW_BYTES
from nearflash.abi.attention.nand import NandTiming
from nearflash.gateware.attention.control.index_queues import IndexQueues
from nearflash.gateware.nand.luns import TICK_LOG2
from nearflash.sim.nand.parts import NandPart

__all__ = ["Channel", "ChannelTiming", "Clock", "IndexQueue", "Request", "Server", "Walker"]

_BEAT_BYTES = 8
_NAME_CYCLES, _COLUMN_CYCLES = 7, 4
"""Bus cycles of a command with column and row, and of one with a column."""
_PLACES = 64
"""Requests that a channel's queue and its controller hold."""
_HIDDEN_SHARE = 0.52
"""Of the cycles for sensing pages and their status, those in which a column of another page settles; from the RTL."""


@dataclass
class Request:
    """A page to be read; `done` is called when its last beat has passed the lanes."""

    channel: int
    lun: int
    link_cycles: float
    lane_cycles: float
    done: Callable[[], None]
    initial: bool = False
    """The first one of an embedding block."""


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


class Server:
    """What there is once: serves in the order of calls."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._free = clock, 0.0

    def serve(self, cycles: float, done: Callable[[], None]) -> float:
        """Call `done` when it has been busy with this for `cycles`; returns when it begins."""
        begin = max(self._clock.now, self._free)
        self._free = begin + cycles
        self._clock.at(self._free, done)
        return begin


class _Lun:
    """A lun: pages asked for, one being sensed, one that it holds for the link."""

    def __init__(self) -> None:
        self.waiting: deque[Request] = deque()
        self.sensed: Request | None = None
        self.sensing = self.holds = False


class Channel:
    """Units, link and lanes of one channel; `cached`: with cache reads, which the kernel does without."""

    def __init__(self, clock: Clock, timing: "ChannelTiming", luns: int, *, cached: bool = False) -> None:
        self._clock, self._sense, self._cache = clock, timing.sense, timing.cache if cached else 0.0
        self._cached = cached
        self._units = [_Lun() for _ in range(luns)]
        self._ready: deque[Request] = deque()
        self._wait: deque[Callable[[], None]] = deque()
        self._busy = False
        self._asked = 0
        self._lanes_free = 0.0
        self.link_cycles = self.lane_cycles = 0.0

    @property
    def full(self) -> bool:
        """Whether there is no place for a request."""
        return self._asked >= _PLACES

    def when_free(self, action: Callable[[], None]) -> None:
        """Call `action` once, when a page has been read."""
        self._wait.append(action)

    def ask(self, request: Request) -> None:
        """Read a page."""
        self._asked += 1
        lun = self._units[request.lun]
        lun.waiting.append(request)
        self._start(lun)

    def _start(self, lun: _Lun) -> None:
        free = lun.sensed is None and (self._cached or not lun.holds)
        if lun.waiting and free and not lun.sensing:
            lun.sensing, request = True, lun.waiting.popleft()
            self._clock.at(self._clock.now + self._sense, lambda: self._sensed(lun, request))

    def _sensed(self, lun: _Lun, request: Request) -> None:
        lun.sensing, lun.sensed = False, request
        self._move(lun)

    def _move(self, lun: _Lun) -> None:
        """Hold the page for the link, when none is held; with cache reads the next one is sensed."""
        if lun.sensed is None or lun.holds:
            return
        request, lun.sensed, lun.holds = lun.sensed, None, True
        self._clock.at(self._clock.now + self._cache, lambda: self._offer(request))
        self._start(lun)

    def _offer(self, request: Request) -> None:
        self._ready.append(request)
        if not self._busy:
            self._transfer()

    def _transfer(self) -> None:
        self._busy = bool(self._ready)
        if not self._busy:
            return
        request, now = self._ready.popleft(), self._clock.now
        self.link_cycles += request.link_cycles
        self.lane_cycles += request.lane_cycles
        self._lanes_free = max(now + request.link_cycles, max(now, self._lanes_free) + request.lane_cycles)
        self._clock.at(self._lanes_free, lambda: self._transferred(request))

    def _transferred(self, request: Request) -> None:
        lun = self._units[request.lun]
        lun.holds = False
        self._asked -= 1
        if self._wait:
            self._wait.popleft()()
        self._move(lun)
        self._start(lun)
        self._transfer()
        request.done()


class IndexQueue:
    """Requests of the index in front of a channel: a block's first one waits for a score buffer, all for a place."""

    def __init__(self, channel: Channel, buffers: int) -> None:
        self._channel, self._buffers = channel, buffers
        self._requests: deque[Request] = deque()
        self._wait: deque[Callable[[], None]] = deque()
        self._asleep = False

    @property
    def full(self) -> bool:
        """Whether there is no place for a request."""
        return len(self._requests) >= IndexQueues.PLACES

    def when_free(self, action: Callable[[], None]) -> None:
        """Call `action` once, when a request has left."""
        self._wait.append(action)

    def ask(self, request: Request) -> None:
        """Queue a request."""
        self._requests.append(request)
        self._go_on()

    def give_back(self) -> None:
        """A block has left its score buffer."""
        self._buffers += 1
        self._go_on()

    def _go_on(self) -> None:
        while self._requests and not self._asleep and (self._buffers or not self._requests[0].initial):
            if self._channel.full:
                self._asleep = True
                self._channel.when_free(self._wake)
                return
            request = self._requests.popleft()
            self._buffers -= request.initial
            self._channel.ask(request)
            if self._wait:
                self._wait.popleft()()

    def _wake(self) -> None:
        self._asleep = False
        self._go_on()


class Walker:
    """Asks for pages one after the other, one head or block at a time; a channel or queue without a place holds it."""

    def __init__(self, clock: Clock, channels: Sequence[Channel] | Sequence[IndexQueue]) -> None:
        self._clock, self._channels = clock, channels
        self.idle = True

    def walk(self, steps: Iterable[tuple[float, Request]], done: Callable[[], None]) -> None:
        """Ask for each request so many cycles after the one before was taken; then call `done`."""
        self.idle = False
        self._steps, self._done = iter(steps), done
        self._go_on()

    def _go_on(self) -> None:
        step = next(self._steps, None)
        if step is None:
            self.idle = True
            self._done()
            return
        cycles, request = step
        self._clock.at(self._clock.now + cycles, lambda: self._ask(request))

    def _ask(self, request: Request) -> None:
        channel = self._channels[request.channel]
        if channel.full:
            channel.when_free(lambda: self._ask(request))
            return
        channel.ask(request)
        self._go_on()


class ChannelTiming:
    """A part's times in clock cycles of a build."""

    def __init__(self, part: NandPart, clock_hz: int) -> None:
        timing = part.timing

        def cycles(time_ns: int) -> int:
            return NandTiming.cycles(time_ns, clock_hz)

        self.sense = cycles(timing.read_ns) + (1 << TICK_LOG2)
        """The controller asks when tR is over, however soon the page was there."""
        self.cache = cycles(timing.cache_busy_ns)
        command, free = cycles(timing.command_ns), cycles(timing.rhw_ns)
        status = 2 * command + cycles(timing.whr_ns) + free
        data = cycles(timing.ccs_ns) + cycles(timing.preamble_ns) + free
        self._page = (1 - _HIDDEN_SHARE) * (_NAME_CYCLES * command + status)
        self._select, self._column = _NAME_CYCLES * command + data, _COLUMN_CYCLES * command + data
        beat = max(1.0, _BEAT_BYTES / timing.link_bytes_per_s * clock_hz)
        self._codeword = RAW_BYTES / _BEAT_BYTES * beat

    def link(self, codewords: float, runs: float) -> float:
        """Cycles of the link for a page: sensing, its status, runs of codewords, of which the first names the page."""
        return self._page + self._select + (runs - 1) * self._column + codewords * self._codeword
