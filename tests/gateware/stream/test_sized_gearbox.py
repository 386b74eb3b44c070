import random

import pytest

from nearflash.gateware.stream.sized_gearbox import SizedNarrow, SizedWiden
from nearflash.sim.pysim.harness import measure_latency, run_streams, transfer_cycles
from nearflash.sim.stalls import STALLS

WIDTH_BITS, RATIO, HALVINGS = 32, 2, 2
PLACES = RATIO << HALVINGS
COUNTS = [8, 1, 5, 6, 7, 4, 3, 1, 1, 12]
CASES = [(halved, first) for halved in range(HALVINGS + 1) for first in range(0, PLACES, 1 << HALVINGS - halved)]


def transfers(halved, first):
    """Groups of each transfer, and the same as bytes (None: none of the transfer's) by beats."""
    rng, size = random.Random(halved), WIDTH_BITS // 8 >> halved
    found = []
    for count in COUNTS:
        groups = [rng.randbytes(size) for _ in range(count)]
        line = [None] * first + list(b"".join(groups))
        line += [None] * (-len(line) % PLACES)
        found.append((groups, [line[start : start + PLACES] for start in range(0, len(line), PLACES)]))
    return found


def whole(line, other):
    return sum((other if byte is None else byte) << 8 * n for n, byte in enumerate(line))


@pytest.mark.parametrize("stalls", STALLS)
@pytest.mark.parametrize(("halved", "first"), CASES)
def test_narrow_gives_the_counted_groups_from_the_first_place_on(halved, first, stalls):
    made, bits = transfers(halved, first), WIDTH_BITS >> halved
    inputs = {"i": [whole(line, 0xFF) for _, lines in made for line in lines], "i_count": COUNTS}
    expected = [(int.from_bytes(group, "little"), group is groups[-1]) for groups, _ in made for group in groups]
    unit, hold = SizedNarrow(WIDTH_BITS, RATIO, halvings=HALVINGS), {"halved": halved, "first": first}
    found = run_streams(unit, inputs, {"o": len(expected)}, stalls=stalls, hold=hold)["o"]
    assert [(group["data"] & (1 << bits) - 1, bool(group["last"])) for group in found] == expected


@pytest.mark.parametrize("stalls", STALLS)
@pytest.mark.parametrize(("halved", "first"), CASES)
def test_widen_strobes_the_bytes_of_groups_alone(halved, first, stalls):
    made, size = transfers(halved, first), WIDTH_BITS // 8 >> halved
    rng, groups, beats = random.Random(9), [], []
    for line_groups, lines in made:
        strobes = [rng.getrandbits(size) for _ in line_groups]
        for n, (group, strb) in enumerate(zip(line_groups, strobes, strict=True)):
            above = rng.getrandbits(WIDTH_BITS) << 8 * size & (1 << WIDTH_BITS) - 1
            data = int.from_bytes(group, "little") | above
            above = (0xF << size) & 0xF
            groups.append({"data": data, "strb": strb | above, "last": n == len(strobes) - 1})
        written = [None] * first + [strb >> n & 1 for strb in strobes for n in range(size)]
        for n, line in enumerate(lines):
            kept = [bit and byte is not None for bit, byte in zip(written[PLACES * n :], line, strict=False)]
            beats.append((line, kept + [0] * (PLACES - len(kept)), n == len(lines) - 1))
    unit, hold = SizedWiden(WIDTH_BITS, RATIO, halvings=HALVINGS), {"halved": halved, "first": first}
    found = run_streams(unit, {"i": groups}, {"o": len(beats)}, stalls=stalls, hold=hold)["o"]
    for beat, (line, kept, last) in zip(found, beats, strict=True):
        assert beat["strb"] == sum(bool(bit) << n for n, bit in enumerate(kept))
        assert beat["last"] == last
        assert all(beat["data"] >> 8 * n & 0xFF == byte for n, byte in enumerate(line) if kept[n])


def test_bytes_without_halvings():
    """As scales use it: a byte at any place of a beat."""
    data = random.Random(2).randbytes(8 * 5)
    beats = [int.from_bytes(data[n : n + 8], "little") for n in range(0, 40, 8)]
    found = run_streams(SizedNarrow(8, 8), {"i": beats, "i_count": [30]}, {"o": 30}, stalls="both", hold={"first": 5})
    assert [group["data"] for group in found["o"]] == list(data[5:35])
    groups = [{"data": byte, "strb": 1, "last": n == 29} for n, byte in enumerate(data[5:35])]
    found = run_streams(SizedWiden(8, 8), {"i": groups}, {"o": 5}, stalls="both", hold={"first": 5})["o"]
    assert [beat["strb"] for beat in found] == [0xE0, 0xFF, 0xFF, 0xFF, 0x07]
    written = [beat["data"] >> 8 * n & 0xFF for beat in found for n in range(8) if beat["strb"] >> n & 1]
    assert bytes(written) == data[5:35]


@pytest.mark.parametrize("halved", range(HALVINGS + 1))
def test_no_bubbles_and_latency(halved):
    count, hold = 20, {"halved": halved}
    beats = -(-count * (1 << HALVINGS - halved) // PLACES)
    narrow, widen = (kind(WIDTH_BITS, RATIO, halvings=HALVINGS) for kind in (SizedNarrow, SizedWiden))
    cycles = transfer_cycles(narrow, {"i": [0] * beats, "i_count": [count]}, {"o": count}, hold=hold)["o"]
    assert cycles == list(range(cycles[0], cycles[0] + count))
    groups = [{"data": 0, "strb": 1, "last": n == count - 1} for n in range(count)]
    cycles = transfer_cycles(widen, {"i": groups}, {"o": beats}, hold=hold)["i"]
    assert cycles == list(range(cycles[0], cycles[0] + count))
    narrow, widen = (kind(WIDTH_BITS, RATIO, halvings=HALVINGS) for kind in (SizedNarrow, SizedWiden))
    assert measure_latency(narrow, {"i": [0], "i_count": [1]}, hold=hold) == SizedNarrow.LATENCY
    assert measure_latency(widen, {"i": groups[-1:]}, hold=hold) == SizedWiden.LATENCY


@pytest.mark.parametrize("component", [SizedNarrow, SizedWiden])
def test_messages(component):
    with pytest.raises(ValueError, match="ratio must be a power of two of at least 2 groups, not 3"):
        component(32, 3)
    with pytest.raises(ValueError, match="halvings must be at least 0, not -1"):
        component(32, 2, halvings=-1)
    with pytest.raises(ValueError, match="width_bits must be a multiple of"):
        component(34, 2, halvings=2)
