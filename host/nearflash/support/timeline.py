"""What ran when, for the eye: spans that chrome://tracing and ui.perfetto.dev show, one row a thread.

What was predicted can stand beside it: a second process, whose clock begins with the first span.

Source: Trace Event Format (Google, 2016), complete events ("ph": "X") and names of threads ("ph": "M").
"""

import json
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from nearflash.support.files import write_durably

__all__ = ["Predicted", "Timeline"]

_MEASURED, _PREDICTED = 1, 2
_FIRST_PREDICTED = 1000
"""Row: some readers want the threads of all processes to differ."""


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
        self._events: deque[dict[str, Any]] = deque(maxlen=limit)
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
            duration = time.perf_counter() - start
            with self._lock:
                self.seconds[name] = self.seconds.get(name, 0.0) + duration
                # By name: a step's threads are new ones, and belong in the rows of the step before.
                row = self._rows.setdefault(threading.current_thread().name, len(self._rows) + 1)
                self._events.append(
                    {
                        "name": name,
                        "ph": "X",
                        "ts": (start - self._origin) * 1e6,
                        "dur": duration * 1e6,
                        "pid": _MEASURED,
                        "tid": row,
                        "args": details,
                    }
                )

    def write(self, path: Path, predicted: Iterable[Predicted] = ()) -> None:
        """Write the spans as trace events (JSON, times in microseconds), and what was predicted beside them."""
        with self._lock:
            events = sorted(self._events, key=lambda event: float(event["ts"]))
            rows = [_named("thread_name", _MEASURED, row, name) for name, row in self._rows.items()]
        origin, places = float(events[0]["ts"]) if events else 0.0, dict[str, int]()
        for each in predicted:
            place = places.setdefault(each.row, _FIRST_PREDICTED + len(places))
            events.append({"name": each.name, "ph": "X", "ts": origin + each.start_s * 1e6, "dur": each.seconds * 1e6,
                           "pid": _PREDICTED, "tid": place, "args": {}})  # fmt: skip
        if places:
            rows += [
                _named("process_name", _MEASURED, 0, "measured"),
                _named("process_name", _PREDICTED, 0, "predicted"),
            ]
            rows += [_named("thread_name", _PREDICTED, place, row) for row, place in places.items()]
        write_durably(path, json.dumps({"displayTimeUnit": "ms", "traceEvents": rows + events}))


def _named(kind: str, process: int, row: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": row, "args": {"name": name}}
