"""What ran when, for the eye: spans that chrome://tracing and ui.perfetto.dev show.

Source: Trace Event Format (Google, 2016), complete events ("ph": "X").
"""

import json
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["Timeline"]


class Timeline:
    """The last `limit` spans, and the seconds spent under each name since the start."""

    def __init__(self, limit: int = 100_000) -> None:
        self.seconds: dict[str, float] = {}
        self._events: deque[dict[str, Any]] = deque(maxlen=limit)
        self._origin = time.perf_counter()

    @contextmanager
    def span(self, name: str, **details: int | float | str) -> Iterator[None]:
        """Note how long the block takes; spans may be nested."""
        start = time.perf_counter()
        try:
            yield
        finally:
            duration = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + duration
            self._events.append(
                {
                    "name": name,
                    "ph": "X",
                    "ts": (start - self._origin) * 1e6,
                    "dur": duration * 1e6,
                    "pid": 1,
                    "tid": 1,
                    "args": details,
                }
            )

    def write(self, path: Path) -> None:
        """Write the spans as trace events (JSON, times in microseconds)."""
        events = sorted(self._events, key=lambda event: float(event["ts"]))
        path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))
