"""Spans as trace events."""

import json
import threading
import time

from nearflash.support.timeline import Timeline


def spans(path):
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


def test_nested_spans_are_written(tmp_path):
    timeline = Timeline()
    with timeline.span("step", step=1):
        with timeline.span("update"):
            time.sleep(0.002)
        with timeline.span("update"):
            pass
    timeline.write(tmp_path / "trace.json")
    events = spans(tmp_path / "trace.json")
    assert [event["name"] for event in events] == ["step", "update", "update"]
    step, update = events[0], events[1]
    assert step["ph"] == "X" and step["args"] == {"step": 1}
    assert step["ts"] <= update["ts"] and update["ts"] + update["dur"] <= step["ts"] + step["dur"]
    assert 0.002 <= timeline.seconds["update"] <= timeline.seconds["step"]


def test_only_the_last_spans_are_kept(tmp_path):
    timeline = Timeline(limit=3)
    for step in range(5):
        with timeline.span("step", step=step):
            pass
    timeline.write(tmp_path / "trace.json")
    events = spans(tmp_path / "trace.json")
    assert [event["args"]["step"] for event in events] == [2, 3, 4]


def test_each_thread_has_a_row(tmp_path):
    """Threads of the same name, one after the other, share it."""
    timeline, together = Timeline(), threading.Barrier(2)

    def work():
        with timeline.span("work"):
            together.wait(60)

    for _ in range(2):
        threads = [threading.Thread(target=work, name=name) for name in ("reader", "writer")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    timeline.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert sorted(names.values()) == ["reader", "writer"]
    rows = [event["tid"] for event in spans(tmp_path / "trace.json")]
    assert [rows.count(row) for row in names] == [2, 2]
