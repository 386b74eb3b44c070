import random

import pytest

from nearflash.gateware.attention.control.dim_selector import DimSelector
from nearflash.sim.pysim.harness import run_streams, transfer_cycles
from nearflash.sim.stalls import STALLS


def rows(keys):
    return [{"keys": keys[k : k + 4], "last": k + 4 == len(keys)} for k in range(0, len(keys), 4)]


def expected(keys, count):
    taken = sorted(range(len(keys)), key=lambda k: (-keys[k], k))[:count]
    return [sum((k + n in taken) << n for n in range(4)) for k in range(0, len(keys), 4)]


def key_sets():
    rng = random.Random(1)
    yield [0] * 8, 3
    yield [0x8000 | k // 3 for k in range(256)], 101
    yield [0xFBFF] * 12, 12
    yield [0x8000 + (k * 7919) % 0x7BFF for k in range(64)], 64
    for _ in range(6):
        size, span = 4 * rng.randrange(1, 33), rng.choice([3, 60, 0xFFFE])
        yield [rng.randrange(span) for _ in range(size)], rng.randrange(1, size + 1)


@pytest.mark.parametrize(("keys", "count"), list(key_sets()))
def test_largest_keys_lower_index_first(keys, count):
    options = {"hold": {"count": count}, "timeout_cycles": 4000}
    got = run_streams(DimSelector(), {"i": rows(keys)}, {"o": len(keys) // 4}, **options)
    assert [int(beat.mask) for beat in got["o"]] == expected(keys, count)
    assert [int(beat.last) for beat in got["o"]] == [0] * (len(keys) // 4 - 1) + [1]


@pytest.mark.parametrize("stalls", STALLS)
def test_sets_follow_each_other(stalls):
    sets = [[random.Random(n).randrange(40) for _ in range(16)] for n in range(3)]
    inputs = [row for keys in sets for row in rows(keys)]
    got = run_streams(DimSelector(), {"i": inputs}, {"o": 12}, hold={"count": 5}, stalls=stalls, timeout_cycles=4000)
    assert [int(beat.mask) for beat in got["o"]] == [mask for keys in sets for mask in expected(keys, 5)]


def test_cycles():
    cycles = transfer_cycles(DimSelector(), {"i": rows(list(range(128)))}, {"o": 32}, hold={"count": 16})
    assert cycles["o"][-1] - cycles["i"][-1] == 11 * 32 + 40
