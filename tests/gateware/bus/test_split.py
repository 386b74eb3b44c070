import random

import pytest

from nearflash.gateware.bus.split import BURST_BEATS_MAX, BurstSplitter, block_beats
from nearflash.sim.pysim.harness import measure_latency, run_streams, transfer_cycles
from nearflash.sim.stalls import STALLS

BEAT_BYTES, BURST_BYTES = 8, 128


def expected_bursts(commands, beat_bytes, block_bytes):
    bursts = []
    for address, beats in commands:
        first, end = address // beat_bytes * beat_bytes, address // beat_bytes * beat_bytes + beats * beat_bytes
        while first < end:
            after = min(end, (first // block_bytes + 1) * block_bytes)
            bursts.append({"address": first % 2**64, "length": (after - first) // beat_bytes - 1})
            first = after
    return bursts


def commands():
    rng = random.Random(6)
    edges = [(0, 16), (8, 15), (8, 16), (120, 1), (120, 2), (4096 - 8, 3), (64, 0), (2**64 - 16, 2), (2**40 + 24, 100)]
    return edges + [(8 * rng.getrandbits(50), rng.randrange(60)) for _ in range(30)]


@pytest.mark.parametrize("stalls", STALLS)
def test_bursts_cover_each_command(stalls):
    expected = expected_bursts(commands(), BEAT_BYTES, BURST_BYTES)
    inputs = [{"address": address, "beats": beats} for address, beats in commands()]
    got = run_streams(BurstSplitter(64, BURST_BYTES), {"i": inputs}, {"o": len(expected)}, stalls=stalls)["o"]
    assert got == expected


def test_256_beats_limit_narrow_buses():
    assert block_beats(32, 4096) == 256 == BURST_BEATS_MAX
    assert block_beats(512, 4096) == 64
    expected = expected_bursts([(1020, 600)], 4, 1024)
    got = run_streams(BurstSplitter(32), {"i": [{"address": 1020, "beats": 600}]}, {"o": len(expected)})["o"]
    assert got == expected


def test_the_address_inside_a_beat_is_ignored():
    assert run_streams(BurstSplitter(64), {"i": [{"address": 0x17, "beats": 1}]}, {"o": 1})["o"][0].address == 0x10


def test_one_burst_every_two_cycles():
    cycles = transfer_cycles(BurstSplitter(64, 128), {"i": [{"address": 0, "beats": 160}]}, {"o": 10})["o"]
    assert cycles == list(range(cycles[0], cycles[0] + 20, 2))


def test_latency():
    assert measure_latency(BurstSplitter(64), {"i": [{"address": 0, "beats": 1}]}) == BurstSplitter.LATENCY


@pytest.mark.parametrize("max_burst_bytes", [4, 96, 8192])
def test_burst_length_message(max_burst_bytes):
    with pytest.raises(ValueError, match="max_burst_bytes must be a power of two from 8 to 4096, not"):
        BurstSplitter(64, max_burst_bytes)
