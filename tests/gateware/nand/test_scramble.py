import numpy as np
import pytest

from nearflash.gateware.nand.scramble import Scrambler
from nearflash.model.nand.scramble import scrambling
from nearflash.sim.pysim.harness import measure_latency, run_streams
from nearflash.sim.stalls import STALLS


@pytest.mark.parametrize("stalls", STALLS)
def test_equals_model(make_page, stalls):
    page = make_page(3, 1)
    beats = page.beats()
    found = run_streams(Scrambler(), {"i": beats}, {"o": len(beats)}, stalls=stalls)["o"]
    expected = page.raw ^ scrambling(page.row, page.lun, np.arange(3))
    np.testing.assert_array_equal([beat.data for beat in found], expected.view("<u8").ravel())
    for given, beat in zip(beats, found, strict=True):
        assert all(getattr(beat, name) == value for name, value in given.items() if name != "data")


def test_twice_is_nothing(make_page):
    beats = make_page(1, 2).beats()
    once = run_streams(Scrambler(), {"i": beats}, {"o": 69})["o"]
    assert [beat.data for beat in once] != [beat["data"] for beat in beats]
    twice = run_streams(Scrambler(), {"i": once}, {"o": 69})["o"]
    assert [beat.data for beat in twice] == [beat["data"] for beat in beats]


def test_latency(make_page):
    assert measure_latency(Scrambler(), {"i": make_page(1, 1).beats()[:1]}) == Scrambler.LATENCY
