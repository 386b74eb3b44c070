"""Timing modes: what must hold between the times of one, and from the slowest to the fastest."""

import pytest

from nearflash.abi.onfi import SDR_MODES


@pytest.mark.parametrize("mode", SDR_MODES)
def test_times_of_a_mode_fit_together(mode):
    timing = SDR_MODES[mode]
    assert timing.wp_ns + timing.wh_ns <= timing.wc_ns and timing.rp_ns + timing.reh_ns <= timing.rc_ns
    assert timing.rea_ns < timing.rc_ns and timing.ds_ns <= timing.wp_ns and timing.dh_ns <= timing.wh_ns


def test_the_fastest_mode_needs_no_time_longer():
    slow, fast = vars(SDR_MODES[0]), vars(SDR_MODES[5])
    assert all(fast[name] <= slow[name] for name in slow if name not in ("rhoh_ns", "rloh_ns"))
    assert fast["rhoh_ns"] > slow["rhoh_ns"]


@pytest.mark.parametrize(("mode", "bytes_per_s"), [(0, 10_000_000), (5, 50_000_000)])
def test_rates_are_those_of_the_standard(mode, bytes_per_s):
    timing = SDR_MODES[mode]
    assert 10**9 // timing.wc_ns == 10**9 // timing.rc_ns == bytes_per_s


def test_data_outlast_the_next_strobe_in_the_fastest_mode_alone():
    slow, fast = SDR_MODES[0], SDR_MODES[5]
    assert slow.rea_ns <= slow.rp_ns and not slow.rloh_ns
    assert fast.rea_ns > fast.rp_ns and fast.rea_ns < fast.rc_ns + fast.rloh_ns


@pytest.mark.parametrize("mode", SDR_MODES)
def test_times_are_whole_and_not_negative(mode):
    assert all(isinstance(value, int) and value >= 0 for value in vars(SDR_MODES[mode]).values())
