"""A timeline of what ran when, for the eye: spans that chrome://tracing and ui.perfetto.dev show, one row a thread.

What was predicted can stand beside it: a second process, whose clock begins with the first span.
"""

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from nearflash.support.trace_events import TraceEvent, make_span, name_process, name_thread, write_trace

__all__ = ["Predicted", "Timeline"]

_MEASURED, _PREDICTED = 1, 2
_FIRST_PREDICTED = 1000
"""Row: some readers want the threads of all processes to differ."""

_Details = tuple[tuple[str, int | float | str], ...]


class Predicted(NamedTuple):
    """A span that was predicted: its row and name, its seconds since the beginning, and how many it takes."""

    row: str
    name: str
    start_s: float
    seconds: float


class Timeline:
    """The last `limit` spans, and the seconds spent under each name since the start, summed over threads."""

    def __init__(self, limit: int = 100_000) -> None:
        self.seconds: dict[str, float] = {}
        self._spans: deque[tuple[str, int, float, float, _Details]] = deque(maxlen=limit)
        """Name, row, start and seconds, both in microseconds; a trace event takes three times the memory."""
        self._rows: dict[str, int] = {}
        self._lock = threading.Lock()
        self._origin = time.perf_counter()

    @contextmanager
    def span(self, name: str, **details: int | float | str) -> Iterator[None]:
        """Note how long the block takes; spans of a thread may be nested, those of several overlap."""
        start = time.perf_counter()
        try:
            yield
        finally:
            # By name: a step's threads are new ones, and belong in the rows of the step before.
            self.add(name, threading.current_thread().name, start, time.perf_counter(), **details)

    def add(self, name: str, row: str, start_s: float, stop_s: float, **details: int | float | str) -> None:
        """Note what ran from `start_s` to `stop_s`, both by time.perf_counter, in a row of that name."""
        with self._lock:
            self.seconds[name] = self.seconds.get(name, 0.0) + stop_s - start_s
            number = self._rows.setdefault(row, len(self._rows) + 1)
            start_us, duration_us = (start_s - self._origin) * 1e6, (stop_s - start_s) * 1e6
            self._spans.append((name, number, start_us, duration_us, tuple(details.items())))

    def write(self, path: Path, predicted: Iterable[Predicted] = ()) -> None:
        """Write the spans as trace events, and what was predicted beside them. Raises OSError."""
        with self._lock:
            spans = sorted(self._spans, key=lambda span: span[2])
            rows = [name_thread(_MEASURED, row, name) for name, row in self._rows.items()]
        events: list[TraceEvent] = [
            make_span(name, (_MEASURED, row), start_us, duration_us, **dict(details))
            for name, row, start_us, duration_us, details in spans
        ]
        origin_us, threads = spans[0][2] if spans else 0.0, dict[str, int]()
        for row, name, start_s, seconds in predicted:
            thread = threads.setdefault(row, _FIRST_PREDICTED + len(threads))
            events.append(make_span(name, (_PREDICTED, thread), origin_us + start_s * 1e6, seconds * 1e6))
        if threads:
            rows += [name_process(_MEASURED, "measured"), name_process(_PREDICTED, "predicted")]
            rows += [name_thread(_PREDICTED, thread, row) for row, thread in threads.items()]
        write_trace(path, rows + events)
