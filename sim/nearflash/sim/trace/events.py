"""A recording as trace events, the JSON format of Chrome's tracing, which ui.perfetto.dev opens.

Tracks: a process for the channels, with a thread a bus and a counter of its busy share; one for the luns, with a
thread each; one for the heads, with a thread each. Times are microseconds of the simulated clock.
Source: "Trace Event Format"; complete events (X), counters (C), metadata (M).
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.sim.trace.recording import BusState, Recording
from nearflash.sim.trace.spans import Span, bus_spans, head_spans, lun_spans
from nearflash.support.files import write_durably

__all__ = ["trace_events", "write_events"]

_CHANNELS, _LUNS, _HEADS = 1, 2, 3
#: First thread number of each; some readers want those of all processes to differ, and none to be 0 or a process's.
_FIRST = {_CHANNELS: 100, _LUNS: 1000, _HEADS: 100_000}
_BIN_CYCLES = 256


def write_events(recording: Recording, path: Path) -> None:
    """Write `trace_events` as a file for ui.perfetto.dev."""
    write_durably(path, json.dumps({"displayTimeUnit": "ns", "traceEvents": list(trace_events(recording))}))


def trace_events(recording: Recording) -> Iterator[dict[str, Any]]:
    """All tracks. Events of a thread do not overlap."""
    us = 1e6 / recording.clock_hz
    for pid, name in ((_CHANNELS, "NAND channels"), (_LUNS, "NAND LUNs"), (_HEADS, "heads")):
        yield _named("process_name", pid, 0, name)
        yield {"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}}
    for number, channel in enumerate(recording.channels):
        spans = bus_spans(channel)
        yield _named("thread_name", _CHANNELS, number, f"channel {number}")
        yield from (_complete(span, _CHANNELS, number, us, _described(recording, number, span)) for span in spans)
        yield from _busy(f"channel {number} busy %", recording.shares(number, _BIN_CYCLES), us)
        luns = list(lun_spans(spans))
        for lun in sorted({span.lun for span in luns}):
            yield _named("thread_name", _LUNS, 256 * number + lun, f"channel {number} lun {lun}")
        for span in luns:
            yield _complete(span, _LUNS, 256 * number + span.lun, us, _described(recording, number, span))
    for head, phases in enumerate(head_spans(recording)):
        yield _named("thread_name", _HEADS, head, f"head {head}")
        yield from (_complete(span, _HEADS, head, us, {}) for span in phases)


def _busy(name: str, share: NDArray[np.float64], us: float) -> Iterable[dict[str, Any]]:
    for index, bin_share in enumerate(share):
        values = {state.name.lower(): round(100 * bin_share[state], 1) for state in BusState if state}
        yield {"name": name, "ph": "C", "ts": index * _BIN_CYCLES * us, "pid": _CHANNELS, "args": values}


def _described(recording: Recording, channel: int, span: Span) -> dict[str, Any]:
    """What an event has beside its time."""
    if span.lun < 0:
        return {}
    if span.row < 0:
        return {"lun": span.lun}
    page = recording.pages[channel, span.lun, span.row]
    return {"lun": span.lun, "row": span.row, "head": page.head, "page": f"{page.kind.name.lower()} {page.number}"}


def _complete(span: Span, pid: int, thread: int, us: float, details: dict[str, Any]) -> dict[str, Any]:
    begin, duration = (round(cycles * us, 4) for cycles in (span.begin, span.end - span.begin))
    place = {"pid": pid, "tid": _FIRST[pid] + thread}
    return {"name": span.name, "ph": "X", "ts": begin, "dur": duration, **place, "args": details}


def _named(what: str, pid: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": _FIRST[pid] + thread, "args": {"name": name}}
