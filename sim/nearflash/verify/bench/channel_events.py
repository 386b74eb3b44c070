"""Parts before a NAND channel in the attend kernel: walkers over pages, queues of the index, servers.

Times are clock cycles.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from nearflash.gateware.attention.control.index_queues import IndexQueues
from nearflash.gateware.attention.control.router import RequestRouter
from nearflash.verify.fixtures.nand_channel import ChannelEvents, EventClock, Request

__all__ = ["IndexQueue", "Server", "Walker", "YieldingPort"]


class Server:
    """A part that there is once: serves in the order of calls."""

    def __init__(self, clock: EventClock) -> None:
        self._clock, self._free = clock, 0.0

    def serve(self, cycles: float, done: Callable[[], None]) -> float:
        """Call `done` when it has been busy with this for `cycles`; returns when it begins."""
        begin = max(self._clock.now, self._free)
        self._free = begin + cycles
        self._clock.at(self._free, done)
        return begin


class IndexQueue:
    """Requests of the index in front of a channel: a block's first one waits for a score buffer, all for a place."""

    def __init__(self, channel: ChannelEvents, buffers: int) -> None:
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


class YieldingPort:
    """A channel for the walker of gathers, which goes last while `hurries()`, and then takes few places."""

    def __init__(self, channel: ChannelEvents, hurries: Callable[[], bool]) -> None:
        self._channel, self._hurries = channel, hurries
        self.ask = channel.ask

    @property
    def full(self) -> bool:
        """Whether there is no place for a request."""
        return self._channel.full or (self._hurries() and self._channel.queued >= RequestRouter.YIELDED)

    def when_free(self, action: Callable[[], None]) -> None:
        """Call `action` once, when a request has left."""
        self._channel.when_free(action, last=self._hurries())


class Walker:
    """Asks for pages one after the other, one head or block at a time; a channel or queue without a place holds it."""

    def __init__(self, clock: EventClock, channels: Sequence[YieldingPort] | Sequence[IndexQueue]) -> None:
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
