import pytest

from nearflash.gateware.bus.write import BurstWriter
from nearflash.verify.cocotb.run import run_testbench


@pytest.mark.full
def test_testbench():
    assert run_testbench("gateware.bus.write").failed == ()


@pytest.mark.full
@pytest.mark.parametrize(
    "parameters",
    [{"data_width_bits": 512, "max_burst_bytes": 4096}, {"data_width_bits": 32, "max_burst_bytes": 256}],
)
def test_testbench_at_other_widths(parameters):
    assert run_testbench("gateware.bus.write", parameters=parameters).failed == ()


def test_the_default_queue_holds_all_bursts():
    assert BurstWriter(512).queue_beats == 8 * 64 + 1
    assert BurstWriter(64, max_burst_bytes=128, max_outstanding=4).queue_beats == 4 * 16 + 1


def test_data_width_message():
    with pytest.raises(ValueError, match=r"data_width_bits must be one of \(32, 64, 128, 256, 512\), not 48"):
        BurstWriter(48)


def test_outstanding_message():
    with pytest.raises(ValueError, match="max_outstanding must be at least 2 bursts, not 1"):
        BurstWriter(64, max_outstanding=1)


def test_burst_length_message():
    with pytest.raises(ValueError, match="max_burst_bytes must be a power of two from 8 to 4096, not 100"):
        BurstWriter(64, max_burst_bytes=100)


def test_queue_message():
    with pytest.raises(ValueError, match="queue_beats must be more than 16, one burst, not 16"):
        BurstWriter(64, max_burst_bytes=128, queue_beats=16)


@pytest.mark.full
def test_a_waiting_burst_does_not_overflow_the_beat_count():
    # Regression: 20 places and a burst of 16 need a count up to 36.
    parameters = {"max_burst_bytes": 128, "queue_beats": 20}
    assert run_testbench("gateware.bus.write", parameters=parameters).failed == ()
