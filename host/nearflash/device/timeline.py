"""What ran when, for the eye: spans that chrome://tracing and ui.perfetto.dev show, one row a thread.

Source: Trace Event Format (Google, 2016), complete events ("ph": "X") and names of threads ("ph": "M").
"""

import json
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["Timeline"]


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
                        "pid": 1,
                        "tid": row,
                        "args": details,
                    }
                )

    def write(self, path: Path) -> None:
        """Write the spans as trace events (JSON, times in microseconds)."""
        with self._lock:
            events = sorted(self._events, key=lambda event: float(event["ts"]))
            rows = [
                {"name": "thread_name", "ph": "M", "pid": 1, "tid": row, "args": {"name": name}}
                for name, row in self._rows.items()
            ]
        path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": rows + events}))
