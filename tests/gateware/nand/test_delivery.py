import pytest

from nearflash.gateware.nand.delivery import Delivery
from nearflash.sim.pysim.harness import measure_latency, run_streams
from nearflash.sim.stalls import STALLS

RUNS = [
    {"run": {"number": 2, "place": 2, "count": 2, "last": 0}, "lun": 5, "row": 0x123456, "failed": 0},
    {"run": {"number": 8, "place": 0, "count": 1, "last": 0}, "lun": 4, "row": 0x123456, "failed": 1},
    {"run": {"number": 9, "place": 1, "count": 2, "last": 1}, "lun": 4, "row": 0x123456, "failed": 0},
]


@pytest.mark.parametrize("stalls", [name for name in STALLS if name != "bursty"])
def test_every_beat_carries_its_place(stalls):
    words = [3 * beat + 1 for beat in range(4 * 69)]
    found = run_streams(Delivery(), {"i": RUNS, "read": words}, {"o": 5 * 69}, stalls=stalls, seed=3)["o"]
    fed = iter(words)
    at = 0
    for run in RUNS:
        for codeword in range(run["run"]["count"]):
            for beat in range(69):
                item, at = found[at], at + 1
                assert item.data == (0 if run["failed"] else next(fed))
                assert (item.first, item.last) == (beat == 0, beat == 68)
                assert (item.number, item.place) == (run["run"]["number"] + codeword, run["run"]["place"] + codeword)
                assert (item.lun, item.row, item.failed) == (run["lun"], run["row"], run["failed"])
                assert item.final == (run["run"]["last"] and codeword == run["run"]["count"] - 1)


def test_latency():
    assert measure_latency(Delivery(), {"i": RUNS[:1], "read": [1]}, i="read") == 0
