import numpy as np
import pytest

from nearflash.gateware.weights.pack import LanePack
from nearflash.sim.pysim.harness import measure_latency, run_streams, transfer_cycles
from nearflash.sim.stalls import STALLS

WIDTH = 4
LANES = np.random.default_rng(1).integers(0, 1 << 16, (32, WIDTH), np.uint16)


def integers(data, size):
    return [int.from_bytes(data[at : at + size], "little") for at in range(0, len(data), size)]


@pytest.mark.parametrize("stalls", STALLS)
@pytest.mark.parametrize("narrow", [0, 1])
@pytest.mark.parametrize("port_bits", [64, 256])
def test_words_of_lanes_or_of_their_low_bytes(port_bits, narrow, stalls):
    data = (LANES & 0xFF).astype(np.uint8) if narrow else LANES
    words = integers(data.tobytes(), port_bits // 8)
    inputs = {"i": integers(LANES.tobytes(), 8)}
    found = run_streams(LanePack(WIDTH, port_bits), inputs, {"o": len(words)}, stalls=stalls, hold={"narrow": narrow})
    assert found["o"] == words


def test_a_group_a_cycle_and_latency():
    inputs = {"i": integers(LANES.tobytes(), 8)}
    cycles = transfer_cycles(LanePack(WIDTH, 64), inputs, {"o": 32})
    assert cycles["i"] == list(range(cycles["i"][0], cycles["i"][0] + 32))
    assert measure_latency(LanePack(WIDTH, 64), {"i": [1]}) == LanePack.LATENCY


def test_messages():
    with pytest.raises(ValueError, match="port_bits must be at least 128, a group, not 64"):
        LanePack(8, 64)
