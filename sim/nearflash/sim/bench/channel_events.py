"""Events of a NAND channel: units sense, one link transfers, the lanes behind it work. Times are clock cycles."""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from nearflash.abi.attend.codeword import RAW_BYTES
from nearflash.sim.nand.parts import NandPart

__all__ = ["Channel", "ChannelTiming", "Clock", "Request", "Server"]

_BEAT_BYTES = 8


@dataclass
class Request:
    """A page to be read; `done` is called when its last beat has passed the lanes."""

    channel: int
    unit: int
    link_cycles: float
    lane_cycles: float
    done: Callable[[], None]


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


class _Unit:
    """A unit: pages asked for, one being sensed, one in the cache register."""

    def __init__(self) -> None:
        self.waiting: deque[Request] = deque()
        self.sensed: Request | None = None
        self.sensing = self.cached = False


class Channel:
    """Units, link and lanes of one channel."""

    def __init__(self, clock: Clock, timing: "ChannelTiming", units: int) -> None:
        self._clock, self._sense, self._cache = clock, timing.sense, timing.cache
        self._units = [_Unit() for _ in range(units)]
        self._ready: deque[Request] = deque()
        self._busy = False
        self._lanes_free = 0.0
        self.link_cycles = self.lane_cycles = 0.0

    def ask(self, request: Request) -> None:
        """Read a page."""
        unit = self._units[request.unit]
        unit.waiting.append(request)
        self._start(unit)

    def _start(self, unit: _Unit) -> None:
        if unit.waiting and not unit.sensing and unit.sensed is None:
            unit.sensing, request = True, unit.waiting.popleft()
            self._clock.at(self._clock.now + self._sense, lambda: self._sensed(unit, request))

    def _sensed(self, unit: _Unit, request: Request) -> None:
        unit.sensing, unit.sensed = False, request
        self._move(unit)

    def _move(self, unit: _Unit) -> None:
        """To the cache register, when that is free; then the next page is sensed."""
        if unit.sensed is None or unit.cached:
            return
        request, unit.sensed, unit.cached = unit.sensed, None, True
        self._clock.at(self._clock.now + self._cache, lambda: self._offer(request))
        self._start(unit)

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
        unit = self._units[request.unit]
        unit.cached = False
        self._move(unit)
        self._transfer()
        request.done()


class ChannelTiming:
    """A part's times in clock cycles of a build."""

    def __init__(self, part: NandPart, clock_hz: int) -> None:
        timing, per_ns = part.timing, clock_hz / 1e9
        mean_array_time = 1 - part.jitter / 2
        self.sense = (timing.wb_ns + timing.read_ns * mean_array_time) * per_ns
        self.cache = timing.cache_busy_ns * per_ns
        poll = 2 * timing.command_ns + timing.whr_ns + timing.preamble_ns
        self._page = (7 * timing.command_ns + 2 * poll) * per_ns
        self._run = (7 * timing.command_ns + timing.preamble_ns + timing.rhw_ns) * per_ns
        beat = max(1.0, _BEAT_BYTES / timing.link_bytes_per_s * clock_hz)
        self._codeword = RAW_BYTES / _BEAT_BYTES * beat

    def link(self, codewords: float, runs: float) -> float:
        """Cycles of the link for a page: sense and status commands, a column change a run, the codewords."""
        return self._page + runs * self._run + codewords * self._codeword
