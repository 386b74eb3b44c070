"""Outcomes as a trace that Perfetto opens: a process for each outcome, its phases after one another, hidden ones below.

Format: Chrome's trace events (JSON), complete events in microseconds.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from nearflash.explore.outcome import Outcome
from nearflash.support.files import PUBLIC_MODE, write_durably

__all__ = ["trace_events", "write_trace"]


def trace_events(outcomes: Sequence[Outcome]) -> list[dict[str, object]]:
    """Metadata and complete events. What is hidden begins with the step: only its length means anything."""
    events: list[dict[str, object]] = []
    for number, found in enumerate(outcomes, 1):
        events.append(
            {"ph": "M", "name": "process_name", "pid": number, "args": {"name": f"{found.system} {found.model}"}}
        )
        for thread, name in ((1, "phases"), (2, "hidden")):
            events.append({"ph": "M", "name": "thread_name", "pid": number, "tid": thread, "args": {"name": name}})
        start = 0.0
        for name, seconds in found.phases.items():
            if seconds:
                events.append(_complete(name, start, seconds, number, 1))
                start += seconds
        events += [_complete(name, 0.0, seconds, number, 2) for name, seconds in found.hidden.items() if seconds]
    return events


def _complete(name: str, start: float, seconds: float, process: int, thread: int) -> dict[str, object]:
    return {"ph": "X", "name": name, "ts": start * 1e6, "dur": seconds * 1e6, "pid": process, "tid": thread}


def write_trace(path: Path, outcomes: Sequence[Outcome]) -> None:
    """A file for ui.perfetto.dev."""
    text = json.dumps({"traceEvents": trace_events(outcomes), "displayTimeUnit": "ms"})
    write_durably(path, text, mode=PUBLIC_MODE)
