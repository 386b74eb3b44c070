"""The event-driven channel against the cycle-accurate attend kernel, on requests as its heads make them.

What the RTL took is in hardware/attended.toml. Flash is what bounds these heads, so that the channels alone give their
rate but for some per cent, in which the kernel has fewer requests for one channel than for another. (On the same
requests the channel is within 3 %: tests/verify/bench/test_attend_channel.py.)
"""

from collections import defaultdict

import numpy as np
import pytest

pytest.importorskip("amaranth", reason="the kernel's builds lie beside its gateware")

from nearflash.abi.attention.codeword import CODEWORD_BYTES
from nearflash.explore.systems.nearflash import MeasuredHeads
from nearflash.explore.tables import read_part
from nearflash.sim.nand.parts import nand_part
from nearflash.verify.bench.attend_performance import RTL
from nearflash.verify.fixtures.nand_channel import ChannelTiming, Request, channel_cycles

CHANNELS, DIM, BEAT_BYTES = 8, 128, 8


def requests(point, heads, seed=1):
    """Index pages of every block with their chosen rows, then a page in eight of K and V; by channel."""
    rng, settings = np.random.default_rng(seed), point.settings
    luns = min(nand_part(point.part).luns, point.config.luns)
    layout, found = settings.index_layout, defaultdict(list)
    gathered = 2 * settings.group_tokens * DIM * 2 / CODEWORD_BYTES
    for head in range(heads):
        for block in range(point.tokens // settings.block_tokens):
            chosen = np.sort(rng.choice(DIM, settings.score_dims, replace=False))
            begins = (np.diff(chosen, prepend=-2) > 1) | (chosen % layout.rows == 0)
            rows, runs = np.bincount(chosen // layout.rows), np.bincount(chosen // layout.rows, begins)
            start = rng.integers(luns)
            for at, (count, run) in enumerate(zip(rows, runs, strict=True)):
                if count:
                    codewords = count * layout.row_codewords
                    # Lanes take two cycles for a beat of int4 index rows.
                    lanes = 2 * codewords * CODEWORD_BYTES / BEAT_BYTES
                    request = Request(0, int(start + at) % luns, codewords, int(run), lanes)
                    found[(head + block) % CHANNELS].append(request)
        groups = point.tokens // settings.group_tokens
        for group in rng.choice(groups, groups // 8, replace=False):
            found[int(head + group) % CHANNELS].append(Request(0, int(rng.integers(luns)), gathered))
    return found


def error(point):
    """Of the RTL's cycles a head."""
    measured, heads = read_part(MeasuredHeads, point.part), 256 if point.tokens == 1024 else 64
    timing = ChannelTiming(nand_part(point.part).timing, point.config.clock_hz)
    luns = min(nand_part(point.part).luns, point.config.luns)
    took = [channel_cycles(each, timing, luns) for each in requests(point, heads).values()]
    cycles = measured.head_cycles[measured.context_tokens.index(point.tokens)]
    return float(np.mean(took)) / heads / cycles - 1


@pytest.mark.parametrize(
    "point",
    [pytest.param(point, marks=[pytest.mark.full] * (point.tokens == 16384 and "slc" in point.part)) for point in RTL],
    ids=lambda point: f"{point.part}-{point.tokens}",
)
def test_cycles_a_head_are_those_of_the_rtl(point):
    found = error(point)
    assert abs(found) < 0.07
