"""Splitting AXI4 bursts into AXI3's."""

import random

import pytest

from nearflash.gateware.bus.axi3 import Axi3Signature, PieceSplitter
from nearflash.sim.pysim.harness import measure_latency, run_streams

BEAT_BYTES = 8


def pieces(address, length):
    """What a burst must become: whole pieces of 16 beats, the rest last."""
    beats, found = length + 1, []
    while beats:
        count = min(16, beats)
        final, outside = count == beats, address >> 32 != 0
        found.append({"address": address % (1 << 32), "length": count - 1, "final": final, "outside": outside})
        address, beats = address + count * BEAT_BYTES, beats - count
    return found


@pytest.mark.parametrize("stalls", ["none", "source", "sink", "both"])
def test_pieces_cover_each_burst_in_order(stalls):
    rng = random.Random(4)
    bursts = [(rng.randrange(1 << 20) * BEAT_BYTES, rng.choice([0, 1, 14, 15, 16, 31, 47, 255, rng.randrange(256)]))
              for _ in range(40)]  # fmt: skip
    bursts += [(1 << 32, 20), (0xFFFF_FFF8, 0), ((1 << 63) + 64, 3)]
    expected = [piece for burst in bursts for piece in pieces(*burst)]
    items = [{"address": address, "length": length} for address, length in bursts]
    found = run_streams(PieceSplitter(8 * BEAT_BYTES), {"i": items}, {"o": len(expected)}, stalls=stalls)["o"]
    assert found == expected


def test_latency():
    splitter = PieceSplitter(64)
    assert measure_latency(splitter, {"i": [{"address": 64, "length": 10}]}) == PieceSplitter.LATENCY


def test_the_signature_is_a_masters_of_axi3():
    members = Axi3Signature(64, 6).members
    widths = {
        name: members[name].shape for name in ("araddr", "arlen", "arid", "arlock", "wid", "wdata", "wstrb", "bid")
    }
    assert widths == {"araddr": 32, "arlen": 4, "arid": 6, "arlock": 2, "wid": 6, "wdata": 64, "wstrb": 8, "bid": 6}
    assert len(members) == 2 * 10 + 6 + 4 + 6
