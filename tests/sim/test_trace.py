"""Traces of a simulated kernel: from a recording made by hand, and the watching of a channel that only counts."""

import json
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from nearflash.abi.attention.codeword import PageKind
from nearflash.abi.errors import CommandError
from nearflash.sim.trace.events import trace_events
from nearflash.sim.trace.picture import plot
from nearflash.sim.trace.recording import (
    BusState,
    ChannelRecording,
    HeadLoad,
    Page,
    Recording,
    WatchedChannel,
)
from nearflash.sim.trace.spans import Span, bus_spans, channel_figures, head_spans, lun_spans
from nearflash.support.trace_events import write_trace

COMMAND, ADDRESS, READ = range(3)
HEADS, HEAD_CYCLES, CLOCK_HZ = 6, 200, 100_000_000


class Bus:
    """Writes a recording cycle by cycle."""

    def __init__(self):
        self.states, self.bus, self.begins = [], [], []

    def rest(self, cycles, state=BusState.IDLE):
        self.states += [state] * cycles

    def take(self, cycles, *cycle, state=BusState.COMMAND):
        self.bus.append(cycle)
        self.begins.append(len(self.states))
        self.states += [state] * cycles

    def command(self, lun, first, row, second):
        for kind, byte in ((COMMAND, first), *((ADDRESS, b) for b in (0, 0, row, 0, 0)), (COMMAND, second)):
            self.take(2, lun, kind, byte)

    def status(self, lun):
        self.take(2, lun, COMMAND, 0x70)
        self.rest(6, BusState.WAIT)
        self.take(3, lun, READ, 0)

    def page(self, lun, row, burst_cycles):
        """Sensed for 20 cycles, ready for 5 until it is selected, waited for, moved."""
        self.command(lun, 0x00, row, 0x30)
        self.rest(20)
        self.status(lun)
        self.rest(5)
        self.command(lun, 0x06, row, 0xE0)
        self.rest(4, BusState.WAIT)
        self.take(burst_cycles, lun, READ, 0, state=BusState.DATA)

    def recording(self):
        return ChannelRecording(
            np.array(self.states, np.uint8), np.array(self.bus, np.uint8), np.array(self.begins, np.int64)
        )


@pytest.fixture
def recording():
    """Each head has an index page and a token page, one behind the other."""
    bus, pages = Bus(), {}
    for head in range(HEADS):
        for kind in (PageKind.INDEX, PageKind.TOKEN):
            row = 2 * head + kind
            pages[0, head % 2, row] = Page(head, kind, 7)
            bus.page(head % 2, row, 10)
        bus.rest(HEAD_CYCLES * (head + 1) - len(bus.states))
    ended = tuple(HEAD_CYCLES * (head + 1) - 1 for head in range(HEADS))
    return Recording(CLOCK_HZ, 1, (bus.recording(),), pages, ended)


def test_spans_of_a_bus():
    bus = Bus()
    bus.rest(10)
    bus.page(1, 9, 50)
    spans = bus_spans(bus.recording())
    assert spans == [
        Span("read", 10, 24, 1, 9),
        Span("status", 44, 46, 1),
        Span("wait", 46, 52),
        Span("status", 52, 55, 1),
        Span("select", 60, 74, 1, 9),
        Span("wait", 74, 78),
        Span("data", 78, 128, 1, 9),
    ]
    assert list(lun_spans(spans)) == [
        Span("sense", 24, 55, 1, 9),
        Span("ready", 55, 60, 1, 9),
        Span("transfer", 60, 128, 1, 9),
    ]


def test_bursts_at_several_columns_are_one_transfer():
    bus = Bus()
    bus.page(0, 3, 20)
    for byte in (0x05, 8, 0, 0xE0):
        bus.take(2, 0, COMMAND if byte in (0x05, 0xE0) else ADDRESS, byte)
    bus.take(30, 0, READ, 0, state=BusState.DATA)
    spans = bus_spans(bus.recording())
    assert [span.name for span in spans][-3:] == ["data", "column", "data"]
    assert spans[-1].row == 3
    assert list(lun_spans(spans))[-1].end == len(bus.states)


def test_a_bus_cycle_before_the_recording_has_no_span():
    assert not bus_spans(ChannelRecording(np.zeros(9, np.uint8), np.array([[2, COMMAND, 0xFF]]), np.zeros(1, int)))


def test_phases_of_heads_follow_each_other(recording):
    for head, phases in enumerate(head_spans(recording)):
        assert [span.name for span in phases] == ["prepare", "scan", "select", "gather", "finish"]
        assert all(left.end == right.begin for left, right in pairwise(phases))
        assert phases[0].begin == (HEAD_CYCLES * head - 1 if head else 0)
        assert phases[-1].end == recording.ended[head]
        assert phases[1].end - phases[1].begin == 78  # a page as `Bus.page` writes it


def test_figures_add_up(recording):
    figures = channel_figures(recording, 0)
    assert figures["busy"] == pytest.approx(figures["data"] + figures["command"] + figures["wait"])
    assert figures["data"] == pytest.approx(20 / HEAD_CYCLES)
    assert figures["idle_ready"] == pytest.approx(10 / HEAD_CYCLES)


def test_events_are_chromes_and_do_not_overlap_in_a_track(recording, tmp_path):
    write_trace(tmp_path / "trace.json", trace_events(recording), "ns")
    trace = json.loads((tmp_path / "trace.json").read_text())
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    tracks = {}
    for event in events:
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    named = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert named.keys() == tracks.keys() and len(set(named.values())) == 1 + 2 + HEADS
    assert len({tid for _, tid in tracks}) == len(tracks)
    for spans in tracks.values():
        assert all(left[1] <= right[0] + 1e-6 for left, right in pairwise(spans))
    assert max(end for spans in tracks.values() for _, end in spans) <= recording.cycles * 1e6 / CLOCK_HZ


def test_a_burst_says_whose_page_it_is(recording):
    bursts = [event for event in trace_events(recording) if event["name"] == "data"]
    assert len(bursts) == 2 * HEADS
    assert bursts[3]["args"] == {"lun": 1, "row": 2, "head": 1, "page": "token 7"}
    assert bursts[0]["dur"] == pytest.approx(0.1)  # ten cycles, in microseconds


def test_counters_are_shares_of_the_busy_bus(recording):
    counted = [event["args"] for event in trace_events(recording) if event["ph"] == "C"]
    assert len(counted) == recording.cycles // 256
    assert all(0 < sum(values.values()) < 100 and values.keys() == {"data", "command", "wait"} for values in counted)


def test_the_picture_is_small(recording, tmp_path):
    plot(recording, tmp_path / "trace.png")
    written = (tmp_path / "trace.png").read_bytes()
    assert written.startswith(b"\x89PNG") and len(written) < 150_000


class CountingChannel:
    """Counts as a channel does, a cycle at a time."""

    def __init__(self):
        self.logged = 0
        self.counts = dict.fromkeys(("data_cycles", "command_cycles", "wait_cycles", "idle_cycles"), 5)

    def statistics(self):
        return SimpleNamespace(**self.counts)

    def log(self):
        return np.zeros((self.logged, 3), np.uint8)


def test_a_watched_channel_knows_each_cycle():
    channel = CountingChannel()
    channel.logged = 1  # before the recording
    watched = WatchedChannel(channel)
    for cycle, state in enumerate(("idle", "command", "command", "wait", "data", "data", "idle")):
        channel.counts[f"{state}_cycles"] += 1
        channel.logged += cycle in (1, 2, 4)
        watched.look(cycle)
    recorded = watched.recording()
    assert recorded.states.tolist() == [0, 2, 2, 1, 3, 3, 0]
    assert recorded.begins.tolist() == [0, 1, 2, 4]


@pytest.mark.parametrize(("options", "named"), [({"tokens": 1000}, "tokens"), ({"tokens": 0}, "tokens"),
                                                ({"heads": 2}, "heads")])  # fmt: skip
def test_workloads_that_cannot_be_shown(options, named):
    with pytest.raises(CommandError, match=named):
        HeadLoad(**options)
