"""Trace events: what chrome://tracing and ui.perfetto.dev show, one row a thread; all times in microseconds.

Source: Trace Event Format (Google, 2016), complete events ("ph": "X") and metadata ("M").
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nearflash.support.files import PRIVATE_MODE, write_durably

__all__ = ["TraceEvent", "make_span", "name_process", "name_thread", "write_trace"]

TraceEvent = dict[str, Any]


def make_span(name: str, row: tuple[int, int], start: float, time: float, /, **details: Any) -> TraceEvent:
    """Make a bar of a row (process, thread). Some readers want the threads of all processes to differ."""
    return {"name": name, "ph": "X", "ts": start, "dur": time, "pid": row[0], "tid": row[1], "args": details}


def name_process(process: int, name: str) -> TraceEvent:
    """Name a group of rows."""
    return {"name": "process_name", "ph": "M", "pid": process, "tid": 0, "args": {"name": name}}


def name_thread(process: int, thread: int, name: str) -> TraceEvent:
    """Name a row."""
    return {"name": "thread_name", "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def write_trace(path: Path, events: Iterable[TraceEvent], unit: str = "ms", mode: int = PRIVATE_MODE) -> None:
    """Write a file durably; readers show its times in `unit`, "ms" or "ns". Raises OSError."""
    write_durably(path, json.dumps({"displayTimeUnit": unit, "traceEvents": list(events)}), mode=mode)
