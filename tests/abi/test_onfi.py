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
