"""Timing modes: what must hold between the times of one, and from the slowest to the fastest."""

import pytest

from nearflash.abi.onfi import SDR_MODES


@pytest.mark.parametrize("mode", SDR_MODES)
def test_times_of_a_mode_fit_together(mode):
    timing = SDR_MODES[mode]
    assert timing.wp_ns + timing.wh_ns <= timing.wc_ns and timing.rp_ns + timing.reh_ns <= timing.rc_ns
    assert timing.rea_ns < timing.rc_ns and timing.ds_ns <= timing.wp_ns and timing.dh_ns <= timing.wh_ns


@pytest.mark.parametrize("mode", range(5))
def test_a_faster_mode_needs_no_time_longer(mode):
    slow, fast = vars(SDR_MODES[mode]), vars(SDR_MODES[mode + 1])
    assert all(fast[name] <= slow[name] for name in slow if name not in ("rhoh_ns", "rloh_ns"))
    assert fast["rhoh_ns"] >= slow["rhoh_ns"] and fast["rloh_ns"] >= slow["rloh_ns"] and fast["rc_ns"] < slow["rc_ns"]


@pytest.mark.parametrize(("mode", "mb_per_s"), [*enumerate((10, 20, 28, 33, 40, 50))])
def test_rates_are_those_of_the_standard(mode, mb_per_s):
    assert 1000 // SDR_MODES[mode].rc_ns == mb_per_s and SDR_MODES[mode].wc_ns <= SDR_MODES[mode].rc_ns


def test_data_outlast_the_next_strobe_in_the_fastest_mode_alone():
    slow, fast = SDR_MODES[0], SDR_MODES[5]
    assert slow.rea_ns <= slow.rp_ns and not slow.rloh_ns
    assert fast.rea_ns > fast.rp_ns and fast.rea_ns < fast.rc_ns + fast.rloh_ns


@pytest.mark.parametrize("mode", SDR_MODES)
def test_times_are_whole_and_not_negative(mode):
    assert all(isinstance(value, int) and value >= 0 for value in vars(SDR_MODES[mode]).values())
