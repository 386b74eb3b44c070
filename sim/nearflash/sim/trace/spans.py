"""Spans of a recording: those of buses, of luns, and of heads as the flash sees them."""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.codeword import PageKind
from nearflash.gateware.nand.link import CycleKind
from nearflash.sim.trace.recording import BusState, ChannelRecording, Recording

__all__ = ["PHASES", "Span", "bus_spans", "channel_figures", "head_spans", "lun_spans"]

PHASES = ("prepare", "scan", "select", "gather", "finish")
#: Commands that begin a span, by what they are for; addresses and second commands (30h, E0h) belong to it.
_NAMES = {0x00: "read", 0x05: "column", 0x06: "select", 0x70: "status", 0xFF: "reset"}


class Span(NamedTuple):
    """Something that lasted from cycle `begin` to before cycle `end`; lun and row are -1 where there is none."""

    name: str
    begin: int
    end: int
    lun: int = -1
    row: int = -1


def bus_spans(channel: ChannelRecording) -> list[Span]:
    """Find the spans of a channel's bus, in order of time.

    "read", "select", "column", "status", "reset": commands with their addresses. "status" is also the byte that comes
    back, "data" a burst of a page. "wait": a wait of ONFI holds the bus. Between spans the bus is idle.
    """
    held = np.flatnonzero(np.diff(np.pad(channel.states == BusState.WAIT, 1))).reshape(-1, 2)
    waits = [Span("wait", int(begin), int(end)) for begin, end in held]
    # What the bus did before the recording began has no time in it.
    taken = (span for span in _Bus().spans(channel) if span.begin < span.end)
    return sorted([*taken, *waits], key=lambda span: span.begin)


class _Bus:
    """Follows the bus cycles of a channel."""

    def __init__(self) -> None:
        self._status: set[int] = set()
        """Units that give out their status, not data."""
        self._selected: dict[int, int] = {}
        """Row whose page a lun gives out."""
        self._addresses: list[int] = []

    def spans(self, channel: ChannelRecording) -> Iterator[Span]:
        span: Span | None = None
        for (lun, code, byte), begin, end in zip(channel.bus.tolist(), channel.begins, _ends(channel), strict=True):
            kind = CycleKind(code)
            if kind is CycleKind.READ or (kind is CycleKind.COMMAND and byte in _NAMES):
                if span:
                    yield span
                span = Span(self._begin(lun, kind, byte), int(begin), int(end), lun, -1)
                if span.name == "data":
                    span = span._replace(row=self._selected[lun])
            elif span:
                span = self._extend(span, kind, byte, int(end))
        if span:
            yield span

    def _begin(self, lun: int, kind: CycleKind, byte: int) -> str:
        if kind is CycleKind.READ:
            return "status" if lun in self._status else "data"
        self._addresses = []
        if _NAMES[byte] == "status":
            self._status.add(lun)
        else:
            self._status.discard(lun)
        return _NAMES[byte]

    def _extend(self, span: Span, kind: CycleKind, byte: int, end: int) -> Span:
        """Extend a span by an address or the second command; a row is complete after five addresses."""
        row = span.row
        if kind is CycleKind.ADDRESS:
            self._addresses.append(byte)
            if len(self._addresses) == 5:
                row = int.from_bytes(self._addresses[2:], "little")
                if span.name == "select":
                    self._selected[span.lun] = row
        return span._replace(end=end, row=row)


def _ends(channel: ChannelRecording) -> NDArray[np.integer]:
    """Find the end of each bus cycle: with the next one, or where the bus comes to rest."""
    rests = np.append(np.flatnonzero(channel.states < BusState.COMMAND), len(channel.states))
    rest_cycles = rests[np.searchsorted(rests, channel.begins)]
    return np.minimum(rest_cycles, np.append(channel.begins[1:], len(channel.states)))


def lun_spans(spans: Iterable[Span]) -> Iterator[Span]:
    """Find the spans of a channel's luns, from its `bus_spans`: the pages that they read.

    "sense": from the read command to the status "ready". "ready": the page waits for the bus. "transfer": from
    its selection to the end of its last burst. A page is sensed only after the one before has been given out.
    """
    reads: dict[int, list[Span]] = {}
    for span in spans:
        if span.name == "read":
            yield from _page(reads.get(span.lun, []))
            reads[span.lun] = []
        if span.lun in reads:
            reads[span.lun].append(span)
    for lun_span in reads.values():
        yield from _page(lun_span)


def _page(spans: list[Span]) -> Iterator[Span]:
    """One page of a lun: spans from its read command on."""
    selects = [span for span in spans if span.name == "select"]
    if not selects:
        return
    first = selects[0]
    ready = max((span.end for span in spans if span.name == "status" and span.end <= first.begin), default=first.begin)
    bounds = (spans[0].end, ready, first.begin, max(span.end for span in spans if span.name != "status"))
    for name, (begin, end) in zip(("sense", "ready", "transfer"), pairwise(bounds), strict=True):
        if begin < end:
            yield Span(name, begin, end, first.lun, first.row)


def head_spans(recording: Recording) -> list[list[Span]]:
    """The PHASES of each head, as the flash and the memory see them.

    prepare: from the free context on (heads enter in order); scan: from the first read of an index page; select: from
    the last byte of one, with the wait for a gather slot; gather: from the first read of a token group; finish: from
    the last byte of one, until the completion is in memory. For heads that are scanned and have no tail.
    """
    touched: dict[tuple[int, PageKind], list[Span]] = {}
    for number, channel in enumerate(recording.channels):
        for span in bus_spans(channel):
            if span.name in ("read", "data"):
                page = recording.pages[number, span.lun, span.row]
                touched.setdefault((page.head, page.kind), []).append(span)
    freed = [0] * recording.contexts + sorted(recording.ended)
    heads = []
    for head, ended in enumerate(recording.ended):
        bounds = [freed[head]]
        for kind in (PageKind.INDEX, PageKind.TOKEN):
            head_reads = touched[head, kind]
            bounds += [min(span.begin for span in head_reads), max(span.end for span in head_reads)]
        heads.append([Span(name, *ends) for name, ends in zip(PHASES, pairwise([*bounds, ended]), strict=True)])
    return heads


def channel_figures(recording: Recording, number: int) -> dict[str, float]:
    """Shares of a channel's cycles in the middle of the batch.

    busy = data + command + wait; the rest is idle; idle_ready: idle while a lun holds a page that is ready, so that
    nothing but the kernel behind the bus can be the reason.
    """
    channel, middle = recording.channels[number], recording.middle
    ready = np.zeros(recording.cycles, bool)
    for span in lun_spans(bus_spans(channel)):
        if span.name == "ready":
            ready[span.begin : span.end] = True
    idle = channel.states == BusState.IDLE
    figures = {state.name.lower(): float((channel.states[middle] == state).mean()) for state in reversed(BusState)}
    return {"busy": 1 - figures["idle"], **figures, "idle_ready": float((idle & ready)[middle].mean())}
