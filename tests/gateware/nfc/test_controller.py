"""The controller against the model of NAND, which checks grammar and waits of every bus cycle by itself."""

from dataclasses import replace

import numpy as np
import pytest

from nearflash.sim.nand.bench import ControllerBench, PageRead
from nearflash.sim.nand.parts import nand_part
from nearflash.sim.stalls import STALLS

CLOCK_HZ = 285_000_000
UNITS = 4
PART = replace(nand_part("slc-1400"), pages_per_block=16)
ROWS = 32


@pytest.fixture(scope="module", params=[False, True], ids=["single", "cached"])
def bench(request):
    return ControllerBench(PART, UNITS, CLOCK_HZ, f"test_nand_{request.param:d}", cached=request.param)


@pytest.fixture
def pages(bench):
    """What the first ROWS rows of every unit store, anew for each test: (unit, row, codeword, byte)."""
    found = np.random.default_rng(7).integers(0, 256, (UNITS, ROWS, 8, 552), np.uint8)
    bench.channel.configure(replace(bench.model, units=1))  # forget everything
    bench.channel.configure(bench.model)
    for unit in range(UNITS):
        bench.channel.load(unit, np.arange(ROWS), found[unit].reshape(ROWS, -1))
    bench.channel.statistics(clear=True)
    return found


def random_reads(count, seed):
    rng = np.random.default_rng(seed)
    masks = [int(rng.integers(1, 1 << int(rng.choice([4, 8, 16])))) for _ in range(count)]
    return [PageRead(int(rng.integers(UNITS)), int(rng.integers(ROWS)), mask) for mask in masks]


def check(answers, reads, pages):
    assert sorted(answer.index for answer in answers) == list(range(len(reads)))
    for answer in answers:
        read = reads[answer.index]
        assert not answer.failed
        for number, found in answer.codewords.items():
            assert np.array_equal(found, pages[read.unit ^ number // 8, read.row, number % 8]), (read, number)


@pytest.mark.parametrize("stalls", [name for name in STALLS if name != "bursty"])
def test_gives_exactly_the_codewords_of_the_masks(bench, pages, stalls):
    reads = random_reads(100, seed=3)
    answers, _ = bench.run(reads, stalls=stalls, seed=11)
    check(answers, reads, pages)
    codewords = sum(read.codewords.bit_count() for read in reads)
    counted = bench.channel.statistics()
    assert counted.read_beats - counted.polls == codewords * 69  # nothing else crosses the link
