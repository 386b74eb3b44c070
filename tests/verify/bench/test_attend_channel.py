"""The event model of a channel against the RTL of its controller."""

import pytest

from nearflash.gateware.nand.luns import TICK_LOG2
from nearflash.sim.nand.parts import nand_part
from nearflash.verify.bench.attend_channel import MIXES, compare, controller
from nearflash.verify.fixtures.nand_channel import ChannelTiming

CLOCK_HZ = 285_000_000


@pytest.fixture(scope="module")
def bench():
    return controller(nand_part("slc-1400"), 4, CLOCK_HZ, "test_nand_single")


@pytest.mark.parametrize("mix", MIXES)
def test_cycles_are_those_of_the_rtl_within_three_hundredths(bench, mix):
    rtl, event = compare(bench, mix, 150)
    assert event == pytest.approx(rtl, rel=0.03)


def test_time_is_looked_at_as_often_as_in_the_gateware():
    assert ChannelTiming(nand_part("slc-1400").timing, CLOCK_HZ).tick == 1 << TICK_LOG2
