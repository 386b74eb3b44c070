import pytest

from nearflash.gateware.stream.join import Join
from nearflash.sim.pysim.harness import measure_latency, run_streams, transfer_cycles
from nearflash.sim.stalls import STALLS

SHAPES = {"key": 8, "score": 16}
KEYS, SCORES = list(range(150)), [7 * n for n in range(150)]
INPUTS = {"i__key": KEYS, "i__score": SCORES}


@pytest.mark.parametrize("stalls", STALLS)
def test_items_pair_by_their_number(stalls):
    expected = [{"key": key, "score": score} for key, score in zip(KEYS, SCORES, strict=True)]
    assert run_streams(Join(SHAPES), INPUTS, {"o": 150}, stalls=stalls)["o"] == expected


def test_inputs_are_taken_together():
    cycles = transfer_cycles(Join(SHAPES), INPUTS, {"o": 150}, stalls="both")
    assert cycles["i__key"] == cycles["i__score"] == cycles["o"]


def test_latency():
    assert measure_latency(Join({"only": 8}), {"i__only": [1]}, i="i__only") == Join.LATENCY


def test_shapes_message():
    with pytest.raises(ValueError, match=r"shapes must name at least one input, not \{\}"):
        Join({})
