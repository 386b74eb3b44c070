import random

import pytest

from nearflash.gateware.stream.gearbox import Narrow, Widen
from nearflash.sim.pysim.harness import measure_latency, run_streams, transfer_cycles
from nearflash.sim.stalls import STALLS

RATIO, WIDTH_BITS, STRB_BITS = 4, 16, 2
#: Groups per transfer: whole beats, tails of every length, single groups, and empty transfers.
COUNTS = [8, 1, 0, 5, 6, 7, 4, 0, 0, 3, 1, 1, 12]


def transfers():
    rng = random.Random(4)
    return [[rng.getrandbits(WIDTH_BITS) for _ in range(count)] for count in COUNTS]


def pack(groups, width_bits):
    return sum(group << (width_bits * slot) for slot, group in enumerate(groups))


def beats_of(groups):
    return [groups[start : start + RATIO] for start in range(0, len(groups), RATIO)]


def narrow_inputs():
    # The lanes past a transfer's end carry ones: they must not come out.
    beats = [beat + [0xFFFF] * (RATIO - len(beat)) for groups in transfers() for beat in beats_of(groups)]
    return {"i": [pack(beat, WIDTH_BITS) for beat in beats], "i_count": COUNTS}


def narrow_outputs():
    return [
        {"data": group, "last": index == len(groups) - 1}
        for groups in transfers()
        for index, group in enumerate(groups)
    ]


def widen_inputs():
    return [{**group, "strb": 1 + index % 3} for index, group in enumerate(narrow_outputs())]


@pytest.mark.parametrize("stalls", STALLS)
def test_narrow_gives_exactly_the_counted_groups(stalls):
    expected = narrow_outputs()
    got = run_streams(Narrow(WIDTH_BITS, RATIO), narrow_inputs(), {"o": len(expected)}, stalls=stalls)
    assert got["o"] == expected


def test_narrow_has_no_bubbles():
    counts = [5, 8, 1, 1, 3, 9]
    inputs = {"i_count": counts, "i": [0] * sum(-(-count // RATIO) for count in counts)}
    cycles = transfer_cycles(Narrow(WIDTH_BITS, RATIO), inputs, {"o": sum(counts)})["o"]
    assert cycles == list(range(cycles[0], cycles[0] + sum(counts)))


def test_narrow_latency():
    assert measure_latency(Narrow(8, 2), {"i": [1], "i_count": [1]}) == Narrow.LATENCY


@pytest.mark.parametrize("stalls", STALLS)
def test_widen_collects_groups_and_strobes(stalls):
    groups = widen_inputs()
    beats, taken = [], 0
    for count in COUNTS:
        beats += beats_of(groups[taken : taken + count])
        taken += count
    got = run_streams(Widen(WIDTH_BITS, RATIO), {"i": groups}, {"o": len(beats)}, stalls=stalls)["o"]
    for beat, groups_in in zip(got, beats, strict=True):
        live_bits = (1 << WIDTH_BITS * len(groups_in)) - 1
        assert beat["data"] & live_bits == pack([group["data"] for group in groups_in], WIDTH_BITS)
        assert beat["strb"] == pack([group["strb"] for group in groups_in], STRB_BITS)
        assert beat["last"] == groups_in[-1]["last"]


def test_widen_has_no_bubbles():
    groups = widen_inputs()
    beats = sum(-(-count // RATIO) for count in COUNTS)
    cycles = transfer_cycles(Widen(WIDTH_BITS, RATIO), {"i": groups}, {"o": beats})["i"]
    assert cycles == list(range(cycles[0], cycles[0] + sum(COUNTS)))


def test_widen_latency():
    groups = [{"data": 0, "strb": 1, "last": last} for last in (0, 1)]
    assert measure_latency(Widen(8, 4), {"i": groups}) == Widen.LATENCY


@pytest.mark.parametrize("component", [Narrow, Widen])
def test_ratio_message(component):
    with pytest.raises(ValueError, match="ratio must be at least 2 groups, not 1"):
        component(8, 1)


@pytest.mark.parametrize("component", [Narrow, Widen])
def test_width_message(component):
    with pytest.raises(ValueError, match="width_bits must be at least 1, not 0"):
        component(0, 2)


def test_strobe_message():
    with pytest.raises(ValueError, match="width_bits must be a multiple of 8 when strb_bits is None, not 12"):
        Widen(12, 2)
