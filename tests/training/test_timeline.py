"""Spans as trace events."""

import json
import time

from nearflash.training.timeline import Timeline


def test_nested_spans_are_written(tmp_path):
    timeline = Timeline()
    with timeline.span("step", step=1):
        with timeline.span("update"):
            time.sleep(0.002)
        with timeline.span("update"):
            pass
    timeline.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
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
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event["args"]["step"] for event in events] == [2, 3, 4]


def test_optimizer_notes_its_phases(tensors, set_gradients, open_optimizer):
    optimizer = open_optimizer(tensors)
    set_gradients(tensors, 0)
    optimizer.step()
    assert set(optimizer.timeline.seconds) == {
        "step", "flash read", "gather gradients", "update", "stage", "flash write", "commit", "publish"}  # fmt: skip
