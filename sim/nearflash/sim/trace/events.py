"""A recording as trace events, the JSON format of Chrome's tracing, which ui.perfetto.dev opens.

Tracks: a process for the channels, with a thread a bus and a counter of its busy share; one for the luns, with a
thread each; one for the heads, with a thread each. Times are microseconds of the simulated clock.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.sim.trace.recording import BusState, Recording
from nearflash.sim.trace.spans import Span, bus_spans, head_spans, lun_spans
from nearflash.support.trace_events import TraceEvent, make_span, name_process, name_thread

__all__ = ["trace_events"]

_CHANNELS, _LUNS, _HEADS = 1, 2, 3
#: First thread number of each; some readers want those of all processes to differ, and none to be 0 or a process's.
_FIRST = {_CHANNELS: 100, _LUNS: 1000, _HEADS: 100_000}
_BIN_CYCLES = 256


def trace_events(recording: Recording) -> Iterator[TraceEvent]:
    """Yield all tracks. Events of a thread do not overlap."""
    us = 1e6 / recording.clock_hz
    for process, name in ((_CHANNELS, "NAND channels"), (_LUNS, "NAND LUNs"), (_HEADS, "heads")):
        yield name_process(process, name)
        yield {"name": "process_sort_index", "ph": "M", "pid": process, "args": {"sort_index": process}}
    for number, channel in enumerate(recording.channels):
        spans = bus_spans(channel)
        yield _name(_CHANNELS, number, f"channel {number}")
        yield from (_bar(span, _CHANNELS, number, us, _page_details(recording, number, span)) for span in spans)
        yield from _busy_counters(f"channel {number} busy %", recording.shares(number, _BIN_CYCLES), us)
        luns = list(lun_spans(spans))
        for lun in sorted({span.lun for span in luns}):
            yield _name(_LUNS, 256 * number + lun, f"channel {number} lun {lun}")
        for span in luns:
            yield _bar(span, _LUNS, 256 * number + span.lun, us, _page_details(recording, number, span))
    for head, phases in enumerate(head_spans(recording)):
        yield _name(_HEADS, head, f"head {head}")
        yield from (_bar(span, _HEADS, head, us, {}) for span in phases)


def _busy_counters(name: str, share: NDArray[np.float64], us: float) -> Iterable[TraceEvent]:
    for index, bin_share in enumerate(share):
        values = {state.name.lower(): round(100 * bin_share[state], 1) for state in BusState if state}
        yield {"name": name, "ph": "C", "ts": index * _BIN_CYCLES * us, "pid": _CHANNELS, "args": values}


def _page_details(recording: Recording, channel: int, span: Span) -> dict[str, Any]:
    if span.lun < 0:
        return {}
    if span.row < 0:
        return {"lun": span.lun}
    page = recording.pages[channel, span.lun, span.row]
    return {"lun": span.lun, "row": span.row, "head": page.head, "page": f"{page.kind.name.lower()} {page.number}"}


def _bar(span: Span, process: int, thread: int, us: float, details: dict[str, Any]) -> TraceEvent:
    begin, duration = (round(count * us, 4) for count in (span.begin, span.end - span.begin))
    return make_span(span.name, (process, _FIRST[process] + thread), begin, duration, **details)


def _name(process: int, thread: int, name: str) -> TraceEvent:
    return name_thread(process, _FIRST[process] + thread, name)
