"""The first reads of a board: its clock, by the processing system's own registers."""

import pytest

from nearflash.abi.errors import DeviceError
from nearflash.device.backends.pynq.clock import check_part, check_port, fclk0_hz, find_crystal_hz, set_clock

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


def test_the_oscillator_is_the_device_trees(tmp_path):
    assert find_crystal_hz(tmp_path) == 50_000_000
    node = tmp_path / "axi/slcr@f8000000/clkc@100"
    node.mkdir(parents=True)
    (node / "ps-clk-frequency").write_bytes((33_333_333).to_bytes(4, "big"))
    crystal_hz = find_crystal_hz(tmp_path)
    check_port((WORKS | {0x108: 30 << 12}).__getitem__, 100_000_000, "register 0", crystal_hz)
    with pytest.raises(DeviceError, match=r"FCLK0 must be 100.00 MHz, .*, not 66.67 MHz"):
        check_port(WORKS.__getitem__, 100_000_000, "register 0", crystal_hz)


def test_the_clock_is_set_behind_the_lock():
    words, written = dict(WORKS), []

    def write(offset, value):
        written.append(offset)
        words[offset] = value

    assert set_clock(words.__getitem__, write, 83_333_333, 50_000_000) == 83_333_333
    assert written == [0x008, 0x170, 0x178, 0x004] and (words[0x008], words[0x004]) == (0xDF0D, 0x767B)
    check_port(words.__getitem__, 83_333_333, "register 0")
    words[0x108] = 18 << 12  # 900 MHz: no divider gives 83.3 MHz
    assert set_clock(words.__getitem__, write, 83_333_333, 50_000_000) == 81_818_181
    words[0x108] |= 1
    with pytest.raises(DeviceError, match="the I/O PLL must run, and give 83333333 Hz by two dividers, not 0 Hz"):
        set_clock(words.__getitem__, write, 83_333_333, 50_000_000)


def test_a_device_of_another_code():
    read = {0x530: 0x2372_2093}.__getitem__
    for code in (0x3722093, None):
        check_part(read, code, "a.bit")
    with pytest.raises(
        DeviceError, match=r"a.bit must be for this board's device, of code 0x3722093 .*0x3727093: name"
    ):
        check_part(read, 0x3727093, "a.bit")
