import pytest

from nearflash.gateware.bus.read import BurstReader
from nearflash.verify.cocotb.run import run_testbench


@pytest.mark.full
def test_testbench():
    assert run_testbench("gateware.bus.read").failed == ()


@pytest.mark.full
@pytest.mark.parametrize(
    "parameters",
    [{"data_width_bits": 512, "max_burst_bytes": 4096}, {"data_width_bits": 32, "max_burst_bytes": 256}],
)
def test_testbench_at_other_widths(parameters):
    assert run_testbench("gateware.bus.read", parameters=parameters).failed == ()


def test_the_default_queue_holds_all_bursts():
    assert BurstReader(512).queue_beats == 8 * 64 + 1
    assert BurstReader(64, max_burst_bytes=128, max_outstanding=4).queue_beats == 4 * 16 + 1


def test_data_width_message():
    with pytest.raises(ValueError, match=r"data_width_bits must be one of \(32, 64, 128, 256, 512\), not 48"):
        BurstReader(48)


def test_outstanding_message():
    with pytest.raises(ValueError, match="max_outstanding must be at least 2 bursts, not 1"):
        BurstReader(64, max_outstanding=1)


def test_burst_length_message():
    with pytest.raises(ValueError, match="max_burst_bytes must be a power of two from 8 to 4096, not 100"):
        BurstReader(64, max_burst_bytes=100)


def test_queue_message():
    with pytest.raises(ValueError, match="queue_beats must be more than 16, one burst, not 16"):
        BurstReader(64, max_burst_bytes=128, queue_beats=16)
