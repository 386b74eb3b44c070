"""Rates that a report derives."""

from nearflash.offload import OffloadReport


def test_rates_of_a_report():
    report = OffloadReport(30, 2.0, 0.5, 1.5, {}, {}, {}, 1, expert_hits=6, experts_ahead=2, expert_misses=4)
    assert report.tokens_per_s == 15 and report.expert_hit_rate == 0.5
    assert OffloadReport(0, 0.0, 0.0, 0.0, {}, {}, {}, 1).expert_hit_rate == 0
