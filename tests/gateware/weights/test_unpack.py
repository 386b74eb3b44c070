import numpy as np
import pytest

from nearflash.gateware.weights.unpack import FieldUnpack
from nearflash.model.weights.fields import join_fields
from nearflash.sim.pysim.harness import measure_latency, run_streams, transfer_cycles
from nearflash.sim.stalls import STALLS

SIZES, WIDTH, PORT_BITS, LANE_BITS = (4, 8, 16), 4, 128, 16
#: Fields of a count: whole words and groups of each size, and tails.
COUNTS = (32, 1, 0, 5, 17, 64, 3, 0, 4, 9)


def component():
    return FieldUnpack(WIDTH, PORT_BITS, SIZES, lane_bits=LANE_BITS, count_bits=8)


def case(bits):
    """Words of random fields, which go on behind a count, and the groups that are to come."""
    rng = np.random.default_rng(bits)
    words, groups = [], []
    for count in COUNTS:
        fields = rng.integers(1, 1 << bits, -(-count * bits // PORT_BITS) * PORT_BITS // bits)
        data = join_fields(fields, bits)
        words += [int.from_bytes(data[at : at + 16], "little") for at in range(0, len(data), 16)]
        lanes = np.pad(fields[:count], (0, -count % WIDTH)).reshape(-1, WIDTH)
        for index, group in enumerate(lanes):
            data = sum(int(field) << LANE_BITS * lane for lane, field in enumerate(group))
            groups.append({"data": data, "last": index == len(lanes) - 1})
    return {"i_count": COUNTS, "i": words}, groups


@pytest.mark.parametrize("stalls", STALLS)
@pytest.mark.parametrize("size", range(len(SIZES)))
def test_gives_exactly_the_counted_fields(size, stalls):
    inputs, groups = case(SIZES[size])
    assert run_streams(component(), inputs, {"o": len(groups)}, stalls=stalls, hold={"size": size})["o"] == groups


def test_a_group_a_cycle():
    inputs, groups = case(16)
    cycles = transfer_cycles(component(), inputs, {"o": len(groups)}, hold={"size": 2})["o"]
    gaps = COUNTS.count(0)
    assert cycles[-1] - cycles[0] == len(groups) - 1 + gaps


def test_latency():
    assert measure_latency(component(), {"i_count": [4], "i": [1]}, hold={"size": 2}) == FieldUnpack.LATENCY


def test_messages():
    with pytest.raises(ValueError, match="port_bits must be at least 64, a group, not 32"):
        FieldUnpack(4, 32, (4, 16), lane_bits=16, count_bits=8)
