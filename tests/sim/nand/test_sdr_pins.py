"""The part at its pins must name every broken rule; driven by hand, at 5 ns a clock, in the slowest mode."""

import pytest

from nearflash.abi.onfi import SDR_MODES
from nearflash.sim.nand.channel import NandViolation
from nearflash.sim.nand.sdr_pins import Pins, SdrNand

CLOCK_HZ = 200_000_000
WRITE = {"ce": 14, "setup": 0, "low": 10, "hold": 5, "high": 10, "dq_late": 0}
"""Clocks of 5 ns: CE# before WE#, latches before WE#, WE# low, what is held behind it, WE# high, DQ after WE# fell."""


class Driver:
    """Plays levels for so many clocks each, as a slow PHY would; `wrong` changes one of its times."""

    def __init__(self, **wrong):
        self.nand, self.times = SdrNand(SDR_MODES[0], CLOCK_HZ), WRITE | wrong
        self.hold(1, ce_n=1)
        self.hold(self.times["ce"])

    def hold(self, clocks, cle=0, ale=0, we_n=1, re_n=1, ce_n=0, dq=None):
        """Levels for so many clocks; DQ as it is at the end."""
        return [self.nand.step(Pins(cle, ale, we_n, re_n, ce_n, dq)) for _ in range(clocks)][-1:]

    def write(self, byte, cle=0, ale=0):
        times = self.times
        if times["dq_late"]:
            self.hold(times["dq_late"], cle, ale, we_n=0)
        self.hold(times["low"] - times["dq_late"], cle, ale, we_n=0, dq=byte)
        if times["hold"]:
            self.hold(times["hold"], cle, ale, dq=byte)
        self.hold(times["high"] - times["hold"])

    def command(self, byte):
        self.write(byte, cle=1)

    def read(self, low=10, high=10, at=8):
        """The byte that lies on DQ so many clocks after RE# fell."""
        (byte,) = self.hold(at, re_n=0)
        if low > at:
            self.hold(low - at, re_n=0)
        self.hold(high)
        return byte


def start(**wrong):
    driver = Driver(**wrong)
    driver.command(0xFF)
    driver.hold(1000)
    return driver


def test_status_and_when_data_are_there():
    driver = start()
    driver.command(0x70)
    driver.hold(30)
    assert driver.read() == 0xE0 and driver.read(at=7) == 0x1F  # before tREA: not the status


@pytest.mark.parametrize(
    ("symbol", "wrong"),
    [("tWP", {"low": 9}), ("tWC", {"high": 9}), ("tDS", {"dq_late": 3}), ("tCLH", {"hold": 3}), ("tCS", {"ce": 2}),
     ("tWH", {"high": 5, "low": 15})],
    ids=str,
)  # fmt: skip
def test_write_cycles_that_break_a_rule(symbol, wrong):
    with pytest.raises(NandViolation, match=f"{symbol} must be at least"):
        driver = start(**wrong)
        driver.command(0x60)
        driver.write(0, ale=1)


def read_status(driver, **times):
    driver.command(0x70)
    driver.hold(30)
    driver.read(**times)
    driver.read(**times)


def test_read_cycles_that_break_a_rule():
    for symbol, times in (("tRP", {"low": 9}), ("tREH", {"high": 5, "low": 15}), ("tRC", {"high": 9})):
        with pytest.raises(NandViolation, match=f"{symbol} must be at least"):
            read_status(start(), **times)


def test_commands_that_break_a_rule():
    with pytest.raises(NandViolation, match="FFh must be the first command, not 70h"):
        Driver().command(0x70)
    with pytest.raises(NandViolation, match="10h must follow its command and addresses"):
        start().command(0x10)
    with pytest.raises(NandViolation, match="tWHR must be at least 120 ns"):
        driver = start()
        driver.command(0x70)
        driver.read()
    with pytest.raises(NandViolation, match="data in must follow 80h"):
        start().write(1)
    with pytest.raises(NandViolation, match="00h must wait until the LUN is ready"):
        driver = Driver()
        driver.command(0xFF)
        driver.command(0x00)
