"""The event-driven drive against the cycle-accurate attend kernel, on the requests that its heads make.

What the RTL took is in hardware/attended.toml. Requests and their times on the link are those of the kernel's own
settings and ONFI timing; flash is what bounds these heads, so that the drive alone gives their rate.
"""

import numpy as np
import pytest

pytest.importorskip("amaranth", reason="the kernel's timing constants lie beside its gateware")

from nearflash.abi.attention.codeword import CODEWORD_BYTES
from nearflash.explore.ssd_events import PageRequest, request_events_s
from nearflash.explore.systems.nearflash import Attended
from nearflash.explore.tables import read_part
from nearflash.sim.bench.attend_performance import RTL
from nearflash.sim.bench.channel_events import ChannelTiming
from nearflash.sim.nand.parts import nand_part

CHANNELS, DIM, BEAT_BYTES = 8, 128, 8


def requests(point, heads, seed=1):
    """Index pages of every block with their chosen rows, then a page in eight of K and V."""
    rng, settings, config = np.random.default_rng(seed), point.settings, point.config
    timing, luns = ChannelTiming(nand_part(point.part), config.clock_hz), min(nand_part(point.part).luns, config.luns)
    layout = settings.index_layout
    pages = timing.link(2 * settings.group_tokens * DIM * 2 / CODEWORD_BYTES, 1)
    for head in range(heads):
        for block in range(point.tokens // settings.block_tokens):
            chosen = np.sort(rng.choice(DIM, settings.score_dims, replace=False))
            begins = (np.diff(chosen, prepend=-2) > 1) | (chosen % layout.rows == 0)
            rows, runs = np.bincount(chosen // layout.rows), np.bincount(chosen // layout.rows, begins)
            start = rng.integers(luns)
            for at, (count, run) in enumerate(zip(rows, runs, strict=True)):
                if count:
                    codewords = count * layout.row_codewords
                    # Lanes take two cycles for a beat of int4 index rows: the link waits for them.
                    link = max(timing.link(codewords, run), 2 * codewords * CODEWORD_BYTES / BEAT_BYTES)
                    yield PageRequest((head + block) % CHANNELS, int(start + at) % luns, link / config.clock_hz)
        groups = point.tokens // settings.group_tokens
        for group in rng.choice(groups, groups // 8, replace=False):
            yield PageRequest(int(head + group) % CHANNELS, int(rng.integers(luns)), pages / config.clock_hz)


def errors():
    """Of the RTL's cycles a head, by row."""
    found = {}
    for point in RTL:
        measured = read_part(Attended, point.part)
        sense_s = ChannelTiming(nand_part(point.part), point.config.clock_hz).sense / point.config.clock_hz
        heads = 1024 if point.tokens == 1024 else 256
        took = request_events_s(requests(point, heads), sense_s)
        cycles = measured.head_cycles[measured.context_tokens.index(point.tokens)]
        found[point.part, point.tokens] = took * point.config.clock_hz / heads / cycles - 1
    return found


def test_cycles_a_head_are_those_of_the_rtl():
    """The RTL's rows are windows of 24 to 144 heads, which their first and last heads shift by some per cent."""
    found = errors()
    print(found)
    assert len(found) == 6
    assert max(abs(each) for each in found.values()) < 0.07
    assert sum(abs(each) for each in found.values()) / 6 < 0.04


@pytest.mark.parametrize("point", RTL[:2], ids=lambda point: str(point.tokens))
def test_slower_cells_and_fewer_requests_change_it_as_they_should(point):
    some = list(requests(point, 64))
    fast, slow = (request_events_s(some, each) for each in (4e-6, 400e-6))
    assert slow > 5 * fast
    assert request_events_s(some[: len(some) // 2], 4e-6) < 0.6 * fast
    assert request_events_s([], 4e-6) == 0.0
