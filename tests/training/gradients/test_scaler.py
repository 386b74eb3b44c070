"""The dynamic loss scale, event by event."""

import pytest

from nearflash.abi.errors import CommandError
from nearflash.training import LossScale


def after(scale, events):
    """The scale after a string of steps: '.' finite, 'x' overflow."""
    for event in events:
        scale = scale.update(overflow=event == "x")
    return scale.scale


@pytest.mark.parametrize(
    "events, factor",
    [
        ("", 1),
        ("...", 1),
        ("....", 2),
        ("........", 4),
        ("x", 1),  # let pass by the hysteresis
        ("xx", 1 / 2),
        ("x...x", 1 / 2),
        ("xxx", 1 / 4),
        ("x....", 2),
        ("x....x", 2),  # a rise makes the hysteresis new
        ("x....xx", 1),
        ("...x...", 1),  # an overflow begins the window again
        ("...x....", 2),
    ],
)
def test_window_and_hysteresis(events, factor):
    assert after(LossScale(1024.0, window=4), events) == 1024.0 * factor


def test_defaults_and_limits():
    assert LossScale() == LossScale(65536.0, 1000, 2.0, 2)
    assert after(LossScale(4.0, hysteresis=1), "x" * 9) == 1.0, "not below 1"
    assert after(LossScale(2.0**1023, window=1), "..") == 2.0**1023, "not infinite"


def test_what_an_argument_means():
    assert LossScale.parse(None) is None
    assert LossScale.parse("dynamic") == LossScale()
    mine = LossScale(8.0)
    assert LossScale.parse(mine) is mine
    assert after(LossScale.parse(128), "xx....x" * 500) == 128.0, "a number never changes"
    with pytest.raises(CommandError, match="loss_scale must be None, 'dynamic', a number or a LossScale, not 'high'"):
        LossScale.parse("high")


def test_resumed_at_the_same_point():
    scale = LossScale(1024.0, window=4)
    for overflow in (True, False, False):
        scale = scale.update(overflow=overflow)
    again = LossScale(16.0, window=4).resume(scale.to_json())
    assert again == scale
    assert LossScale(16.0, window=0).resume(scale.to_json()).scale == 16.0, "a fixed one is what the script says"


@pytest.mark.parametrize(
    "values, message",
    [
        ({"scale": 0.0}, "loss_scale must be positive and finite, not 0.0"),
        ({"scale": float("inf")}, "loss_scale must be positive and finite, not inf"),
        ({"window": -1}, "window must be at least 0, not -1"),
        ({"factor": 1.0}, "factor must be over 1, not 1.0"),
        ({"hysteresis": 0}, "hysteresis must be at least 1, not 0"),
    ],
)
def test_bad_values(values, message):
    with pytest.raises(CommandError, match=message):
        LossScale(**values)
