"""Parts of deltas as beats of wide ports: in memory each word is in its place, and none other is touched."""

import numpy as np
import pytest

from nearflash.gateware.gradients.delta_beats import DeltaBeats
from nearflash.sim.pysim.harness import transfer_cycles
from nearflash.sim.stalls import STALLS
from nearflash.sim.verilator.streams import StreamUnit


@pytest.fixture(scope="module", params=[2, 4, 8])
def unit(request):
    unit = StreamUnit(DeltaBeats(request.param), f"delta-beats-{request.param}")
    unit.ratio = request.param
    return unit


def parts_of(tiles):
    """First word, words, last: tiles in order, the header behind them."""
    first = np.cumsum([4, *tiles])
    parts = [
        (int(at), size, number == len(tiles) - 1) for number, (at, size) in enumerate(zip(first, tiles, strict=False))
    ]
    return [*parts, (0, 4, True)]


def beats_of(tiles, ratio):
    """As the contract has it: first beat and beats of each command; beats in all."""
    commands = []
    for first, words, last in parts_of(tiles):
        end = first + words
        ends = -(-end // ratio) if last else end // ratio
        if ends > first // ratio:
            commands.append((first // ratio, ends - first // ratio))
    return commands


@pytest.mark.parametrize("stalls", STALLS)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_words_come_to_their_places(unit, stalls, seed):
    """Deltas one after another: tiles of one word, tiles that end with a beat, tiles of many beats."""
    rng, ratio = np.random.default_rng(seed), unit.ratio
    deltas = [
        [1],
        [2],
        [3],
        [4],
        [5],
        [8, 8],
        [1] * 20,
        *(rng.integers(1, 40, rng.integers(1, 12)).tolist() for _ in range(20)),
    ]
    parts = [part for tiles in deltas for part in parts_of(tiles)]
    words = rng.integers(1, 1 << 64, sum(size for _, size, _ in parts), np.uint64)
    commands = [command for tiles in deltas for command in beats_of(tiles, ratio)]
    found = unit.run(
        {
            "i_command": np.array([first | size << 32 | last << 48 for first, size, last in parts], np.uint64),
            "i": words,
        },
        {"o_command": len(commands), "o": sum(beats for _, beats in commands)},
        stalls=stalls,
        seed=seed,
    )
    assert [(int(given) & 0xFFFFFFFF, int(given) >> 32) for given in found["o_command"]] == commands
    beats, given = iter(integers(found["o"])), iter(words.tolist())
    for tiles in deltas:
        memory, expected = ({} for _ in range(2))
        for first, count in beats_of(tiles, ratio):
            for number in range(first, first + count):
                beat = next(beats)
                for k in range(ratio):
                    if beat >> 64 * ratio + k & 1:
                        assert number * ratio + k not in memory, "written once"
                        memory[number * ratio + k] = beat >> 64 * k & (1 << 64) - 1
        for first, count, _ in parts_of(tiles):
            expected |= {first + k: next(given) for k in range(count)}
        assert memory == expected


def integers(items):
    """Rows of 32-bit words, or numbers, as integers."""
    if items.ndim == 1:
        return items.tolist()
    return [int.from_bytes(np.ascontiguousarray(row).astype(f"<u{row.itemsize}").tobytes(), "little") for row in items]


def test_other_ratios_are_refused():
    with pytest.raises(ValueError, match="ratio must be 2, 4 or 8, not 1"):
        DeltaBeats(1)


def test_latency():
    """Of a tile of four words, which with the header's place fill a beat of eight."""
    given = {"i_command": [{"first": 4, "words": 4, "last": 1}, {"first": 0, "words": 4, "last": 1}], "i": [1] * 8}
    cycles = transfer_cycles(DeltaBeats(8), given, {"o": 2, "o_command": 2})
    assert cycles["o"][0] - cycles["i"][3] == cycles["o"][1] - cycles["i"][7] == DeltaBeats.LATENCY
