"""Outcomes as trace events: a process for each outcome, its phases after one another, hidden ones below."""

from collections.abc import Iterator, Sequence

from nearflash.explore.outcome import Outcome
from nearflash.support.trace_events import TraceEvent, make_span, name_process, name_thread

__all__ = ["trace_events"]


def trace_events(outcomes: Sequence[Outcome]) -> Iterator[TraceEvent]:
    """Yield names and spans. What is hidden begins with the step: only its length means anything."""
    for process, outcome in enumerate(outcomes, 1):
        yield name_process(process, f"{outcome.system} {outcome.model}")
        yield from (name_thread(process, thread, name) for thread, name in ((1, "phases"), (2, "hidden")))
        start = 0.0
        for name, seconds in outcome.phases.items():
            if seconds:
                yield make_span(name, (process, 1), start * 1e6, seconds * 1e6)
                start += seconds
        for name, seconds in outcome.hidden.items():
            if seconds:
                yield make_span(name, (process, 2), 0.0, seconds * 1e6)
