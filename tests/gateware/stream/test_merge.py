import pytest

from nearflash.gateware.stream.merge import Merge
from nearflash.sim.pysim.harness import measure_latency, run_streams, transfer_cycles
from nearflash.sim.stalls import STALLS


@pytest.mark.parametrize("stalls", STALLS)
def test_items_of_each_input_in_order(stalls):
    inputs = {f"i__{n}": [16 * n + k for k in range(5 * n + 1)] for n in range(3)}
    got = run_streams(Merge(8, 3), inputs, {"o": 18}, stalls=stalls)["o"]
    assert [[item.item for item in got if item.source == n] for n in range(3)] == list(inputs.values())


def test_inputs_take_turns():
    got = run_streams(Merge(8, 3), {f"i__{n}": [n] * 4 for n in range(3)}, {"o": 12})["o"]
    assert [int(item.source) for item in got] == [1, 2, 0] * 4


def test_latency_and_rate():
    assert measure_latency(Merge(8, 2), {"i__1": [3]}, i="i__1") == Merge.LATENCY
    cycles = transfer_cycles(Merge(8, 2), {"i__0": [1] * 5, "i__1": [2] * 5}, {"o": 10})["o"]
    assert cycles == list(range(cycles[0], cycles[0] + 10))


def test_count_message():
    with pytest.raises(ValueError, match="count must be at least 2 inputs, not 1"):
        Merge(8, 1)
