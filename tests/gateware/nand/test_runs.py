import random
from itertools import groupby

import pytest

from nearflash.gateware.nand.runs import RunFinder
from nearflash.sim.pysim.harness import run_streams
from nearflash.sim.stalls import STALLS


def expected(codewords, page_log2):
    """Runs of a mask, found by grouping the numbers."""
    size = 1 << page_log2
    numbers = [number for number in range(64) if codewords >> number & 1]
    runs, pages = [], set()
    for _, group in groupby(enumerate(numbers), key=lambda item: (item[1] - item[0], item[1] // size)):
        run = [number for _, number in group]
        page = run[0] // size
        runs.append(
            {"number": run[0], "place": run[0] % size, "count": len(run), "second": page, "fresh": page not in pages}
        )
        pages.add(page)
    return [{**run, "last": run is runs[-1]} for run in runs]


def masks(seed, count=40):
    rng = random.Random(seed)
    fixed = [(3, 0xFFFF), (3, 1), (3, 0x8000), (5, 2**64 - 1), (0, 0b11), (0, 0b10), (5, 1 << 31 | 1 << 32)]
    for page_log2 in (rng.randrange(6) for _ in range(count)):
        width = 2 << page_log2
        fixed.append((page_log2, (rng.getrandbits(width) & rng.getrandbits(width)) or 1))
    return fixed


@pytest.mark.parametrize("stalls", [name for name in STALLS if name != "bursty"])
def test_runs_of_random_masks(stalls):
    given = masks(seed=4)
    wanted = [run for page_log2, codewords in given for run in expected(codewords, page_log2)]
    items = [{"codewords": codewords, "page_log2": page_log2} for page_log2, codewords in given]
    found = run_streams(RunFinder(), {"i": items}, {"o": len(wanted)}, stalls=stalls, seed=2)["o"]
    assert [{name: getattr(run, name) for name in wanted[0]} for run in found] == wanted
