"""A thread that makes an optimizer's calls, so that no interrupt cuts one of them in two.

Python raises KeyboardInterrupt, and what signal handlers raise, in the main thread, between any two instructions:
inside `threading.Condition`, too, whose lock then stays taken. So that thread only waits, on what is atomic in C.
"""

import os
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from queue import SimpleQueue
from threading import Lock, Thread, current_thread
from typing import Generic, TypeVar

import torch

from nearflash.abi.errors import StateError

__all__ = ["Worker"]

T = TypeVar("T")


class Worker:
    """Makes one call after another, in its thread; it ends with `close`, or when nobody refers to it any more."""

    def __init__(self, name: str) -> None:
        """name: of the thread, in traces."""
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._last: list[Callable[[], None]] = []
        self._process = os.getpid()
        self._thread = Thread(target=_serve, args=(self._calls, self._last), name=name, daemon=True)
        self._thread.start()
        # Queues of this kind may be written to while the interpreter collects garbage, other locks not.
        self._end = weakref.finalize(self, self._calls.put, None)
        self._end.atexit = False

    def __call__(self, call: Callable[[], T], interrupted: Callable[[], None] = lambda: None) -> T:
        """Return or raise what the call does. An interrupt is raised when the call has ended, or before it has begun.

        interrupted: what is to be done when one comes, in this thread, that the call may end sooner. CUDA work goes to
        the streams that are current here. Gradients are not recorded. Raises StateError in a forked process, and after
        `close`.
        """
        if not self._end.alive:
            raise StateError("the optimizer must be open, not closed: construct it again with the same path to go on")
        if self._process != os.getpid():
            raise StateError("an optimizer must be used in the process that made it, not in a fork of that")
        if current_thread() is self._thread:
            raise StateError("an optimizer must not be called from within its own call (a norm hook): call it after")
        request = _Call(call)
        try:
            self._calls.put(request)
            request.ended.acquire()
        except BaseException:
            if not request.taken.acquire(blocking=False):
                interrupted()
                while not request.done:
                    with suppress(KeyboardInterrupt):
                        request.ended.acquire()
            raise
        return request.outcome()

    def later(self, call: Callable[[], None]) -> None:
        """Have the call made after those before it, without waiting. It must not raise."""
        self._calls.put(_Call(call))

    def at_end(self, call: Callable[[], None]) -> None:
        """Have a call made when the thread ends, also where nobody called `close`; it must not refer to the owner."""
        self._last.append(call)

    def close(self) -> None:
        """End the thread. It may be called twice."""
        self._end()
        self._thread.join()


class _Call(Generic[T]):
    """A call, what came of it, and how far it is."""

    def __init__(self, call: Callable[[], T]) -> None:
        on_cuda = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        self._streams = [torch.cuda.current_stream(device) for device in on_cuda]
        self._call = call
        self._result: list[T] = []
        self._error: BaseException | None = None
        self.taken = Lock()
        """Who takes it decides: the thread, that the call is made; the caller, that it is not."""
        self.done = False
        self.ended = Lock()
        """Released when the call is done."""
        self.ended.acquire()

    def make(self) -> None:
        """In the thread."""
        if not self.taken.acquire(blocking=False):
            return
        try:
            with torch.no_grad(), ExitStack() as streams:
                for stream in self._streams:
                    streams.enter_context(torch.cuda.stream(stream))
                self._result.append(self._call())
        except BaseException as error:
            self._error = error
        finally:
            self.done = True
            self.ended.release()

    def outcome(self) -> T:
        """Return what the call gave, or raise what it raised."""
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame
        return self._result[0]


def _serve(calls: "SimpleQueue[_Call | None]", last: list[Callable[[], None]]) -> None:
    while (call := calls.get()) is not None:
        call.make()
        del call  # it refers to the optimizer
    for action in last:
        with suppress(Exception):  # nobody is there to be told
            action()
    last.clear()
