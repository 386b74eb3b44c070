import pytest

from nearflash.gateware.stream.fork import Fork
from nearflash.sim.pysim.harness import measure_latency, run_streams, transfer_cycles
from nearflash.sim.stalls import STALLS

ITEMS = list(range(150))


@pytest.mark.parametrize("stalls", STALLS)
def test_every_output_gets_every_item(stalls):
    got = run_streams(Fork(8, 3), {"i": ITEMS}, {f"o__{n}": len(ITEMS) for n in range(3)}, stalls=stalls)
    assert all(got[f"o__{n}"] == ITEMS for n in range(3))


def test_a_quick_output_is_ahead_of_a_slow_one():
    cycles = transfer_cycles(Fork(8, 2), {"i": ITEMS}, {"o__0": 150, "o__1": 150}, stalls="sink", seed=1)
    assert any(a != b for a, b in zip(cycles["o__0"], cycles["o__1"], strict=True))
    assert cycles["i"] == [max(pair) for pair in zip(cycles["o__0"], cycles["o__1"], strict=True)]


def test_latency():
    assert measure_latency(Fork(8, 1), {"i": [1]}, o="o__0") == Fork.LATENCY


def test_count_message():
    with pytest.raises(ValueError, match="count must be at least 1 output, not 0"):
        Fork(8, 0)
