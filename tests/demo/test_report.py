"""What makes the demo fail, and rates from counters."""

import pytest

from nearflash.demo.report import DemoReport
from nearflash.device import open_device
from nearflash.training import Traffic


@pytest.fixture
def report():
    return DemoReport(
        params=10, rtl_steps=1, host_steps=1, profile="ieee", rtl_device="a", host_device="b", digest="",
        words_compared=40, text_loss_before=2.0, text_loss_after=1.0,
    )  # fmt: skip


def test_a_good_report_has_no_failures(report):
    assert report.failures() == []


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("mismatches", 1, "1 of 40 words differ"),
        ("words_compared", 0, "no word was compared"),
        ("torch_rel_error", 2e-6, r"by 2.00e-06 of the update, over 1e-06"),
        ("torch_rel_error", float("nan"), "by nan"),
        ("text_loss_after", 2.5, "the loss over the text did not fall: 2.000 to 2.500"),
    ],
)
def test_failures(report, field, value, message):
    setattr(report, field, value)
    (failure,) = report.failures()
    assert message in failure


def test_rates(report):
    counters = {"cycles": 150, "read_beats": 200, "write_beats": 175}
    traffic = Traffic(steps=1, params=100, to_device_bytes=400, from_device_bytes=200, flash_read_bytes=1200,
                      flash_written_bytes=1200, counters=counters)  # fmt: skip
    with open_device("model:update-tiny") as device:
        report.take_traffic(traffic, device.identity)
    assert report.cycles_per_param == 1.5
    assert report.device_bytes_per_param == 30
    assert (report.host_link_bytes_per_param, report.flash_bytes_per_param) == (6, 24)
    assert "1.500 per parameter" in "\n".join(report.summary())
