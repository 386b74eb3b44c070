"""The performance bench: its rows on the small build, and that its points fit theirs."""

import dataclasses

import pytest

from nearflash.abi.attention.codeword import PageTag
from nearflash.model.attention.memory.settings import Addresses
from nearflash.verify.bench.attend_performance import EVENTS, RTL, Point, event_rows, performance_rows

SMALL = Point("slc-1400", 1024, 4, 12, group=1, build="attend-tiny")


def test_a_small_build_in_the_rtl_and_in_the_event_model():
    rtl, event = performance_rows([SMALL])
    assert (rtl["source"], event["source"]) == ("rtl", "event")
    assert rtl["heads_compared"] == 4 and rtl["mismatches"] == 0
    assert rtl["channel_busy_least"] <= rtl["channel_busy_fraction"] <= rtl["channel_busy_most"] <= 1
    assert event["cycles_per_head"] == pytest.approx(rtl["cycles_per_head"], rel=0.2)


def test_the_event_model_alone_has_a_row_for_each_point():
    points = [dataclasses.replace(SMALL, group=group, build="attend-zu17eg") for group in (4, 8)]
    four, eight = event_rows(points)
    assert [(row["source"], row["config"], row["group"]) for row in (four, eight)] == [
        ("event", "attend-zu17eg", 4), ("event", "attend-zu17eg", 8)
    ]  # fmt: skip
    assert four["channel_busy_fraction"] > eight["channel_busy_fraction"], "eight query heads take two passes a beat"


def test_all_points_fit_their_builds():
    for point in (*RTL, *EVENTS):
        descriptor = point.settings.descriptor(PageTag(0, 0, 0), point.tokens, point.group, Addresses())
        assert descriptor.fits(point.config, point.contexts), point
        assert point.heads >= 2 * point.contexts
