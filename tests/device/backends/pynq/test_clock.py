"""The first reads of a board: its clock, by the processing system's own registers."""

import pytest

from nearflash.abi.errors import DeviceError
from nearflash.device.backends.pynq.clock import check_port, fclk0_hz

IO_PLL = 20 << 12
WORKS = {0x108: IO_PLL, 0x100: 40 << 12, 0x104: 32 << 12, 0x170: 2 << 20 | 5 << 8, 0x178: 0, 0x240: 0, 0x900: 0xF}


def check(changes, clock_hz=100_000_000):
    check_port((WORKS | changes).__getitem__, clock_hz, "register 0 at 0x40000000")


def test_a_clock_that_runs():
    check({})
    assert fclk0_hz(WORKS.__getitem__) == 100e6
    check({0x170: 1 << 20 | 9 << 8}, 111_111_111)
    check({0x170: 3 << 4 | 1 << 20 | 16 << 8})  # from the DDR PLL, 1.6 GHz


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({0x178: 1}, "FCLK0's gate"),
        ({0x240: 1}, "the logic's reset"),
        ({0x900: 0}, "the level shifters"),
        ({0x900: 0xA}, "the level shifters"),
        ({0x170: 2 << 20}, "FCLK0 must have a PLL that runs and two dividers"),
        ({0x108: IO_PLL | 2}, "FCLK0 must have a PLL that runs"),
    ],
)
def test_what_would_hang_is_named_and_not_read(changes, what):
    with pytest.raises(
        DeviceError, match="an AXI read of register 0 at 0x40000000 would hang the processors"
    ) as raised:
        check(changes)
    assert str(raised.value).startswith(what)


def test_another_clock():
    with pytest.raises(DeviceError, match=r"FCLK0 must be 50.00 MHz, for which .*, not 100.00 MHz"):
        check({}, 50_000_000)
