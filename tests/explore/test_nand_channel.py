"""Events of a NAND channel: against times worked out by hand, and what follows from more of something."""

from dataclasses import replace

import numpy as np
import pytest

from nearflash.abi.nand import NandTiming
from nearflash.explore.nand_channel import Channel, ChannelTiming, Clock, Request, channel_cycles

PART = NandTiming(read_ns=4000, program_ns=75_000, erase_ns=1_000_000, link_bytes_per_s=800_000_000)
TIMING = ChannelTiming(PART, 100_000_000)
"""A clock is 10 ns: a bus cycle 3, tR 400, tWHR 12, tCCS 30, tRHW 10, a preamble 5, a codeword 69."""


def alone_on_link(codewords, runs):
    """Clocks that a page takes the link by itself: sensing, status, a column change and a burst for each run."""
    commands = 3 * (7 + 7 + (runs - 1) * 4)
    return commands + TIMING.status + TIMING.free + runs * (30 + 5 + 10) + codewords * 69


def times(requests, luns=4):
    """When each (lun, codewords, ...), all asked for at 0, is done; and the channel."""
    clock, found = Clock(), {}
    channel = Channel(clock, TIMING, luns)
    for i, (lun, codewords, *more) in enumerate(requests):
        channel.ask(Request(0, lun, codewords, *more, done=lambda i=i: found.__setitem__(i, clock.now)))
    clock.run()
    return [found[i] for i in range(len(requests))], channel


def test_times_of_a_part():
    assert (TIMING.command, TIMING.sense_ticks, TIMING.status, TIMING.settle, TIMING.free) == (3, 26, 20, 30, 10)
    assert TIMING.data(2) == 5 + 2 * 69
    page = alone_on_link(2, 1)
    assert page == 20 + 10 + 14 * 3 + 30 + 5 + 138 + 10
    assert alone_on_link(2, 2) - page == 4 * 3 + 30 + 5 + 10
    fast = ChannelTiming(replace(PART, link_bytes_per_s=4_800_000_000), 100_000_000)
    assert fast.data(1) == 5 + 69, "8 bytes a clock"


def test_one_page_is_sensed_looked_at_named_and_moved():
    (end,), channel = times([(0, 8)])
    read = 2 + 2 + 1 + 21  # taken, scanned, chosen, commands; then the time is looked at each 16 clocks
    named = (read // 16 + 26) * 16 + 20 + 21
    assert named + 30 + TIMING.data(8) < end < named + 30 + TIMING.data(8) + 40
    assert channel.data_cycles == TIMING.data(8)
    assert channel.link_cycles == pytest.approx(alone_on_link(8, 1), abs=2)


def test_luns_sense_together_and_share_the_link():
    (alone,), _ = times([(0, 8)])
    ends, channel = times([(lun, 8) for lun in range(4)])
    gaps = np.diff(sorted(ends))
    assert alone < min(ends) < alone + 4 * 21
    assert (gaps < alone_on_link(8, 1)).all() and (gaps > TIMING.data(8)).all()
    assert channel.link_cycles < 4 * alone_on_link(8, 1), "waits of one LUN hide commands to others"


def test_a_lun_holds_its_page_until_it_is_read_out():
    (alone,), _ = times([(0, 8)])
    ends, _ = times([(0, 8)] * 3)
    assert ends == pytest.approx([alone, 2 * alone, 3 * alone], abs=3 * 16)


def test_pages_that_are_ready_overtake():
    ends, _ = times([(0, 8), (0, 8), (0, 8), (3, 1)])
    assert ends[3] < ends[1]


def test_runs_take_a_column_change_each():
    (one,), _ = times([(0, 4, 1)])
    (two,), _ = times([(0, 4, 2)])
    assert two - one == pytest.approx(4 * 3 + 30 + 5 + 10, abs=5)


def test_slow_lanes_hold_the_link():
    quick, _ = times([(0, 1), (1, 1)])
    slow, channel = times([(0, 1, 1, 500), (1, 1, 1, 500)])
    assert slow[1] - slow[0] > 490 > quick[1] - quick[0] and channel.lane_cycles == 1000


def test_a_lun_with_many_requests_holds_back_those_behind():
    requests = [(0, 8)] * 12 + [(1, 8)]
    assert times(requests)[0][12] > times(requests[:5])[0][4]


def test_places_in_the_queue_and_the_table_are_given_back():
    clock, done = Clock(), []
    channel = Channel(clock, TIMING, 4, queued=2, requests=3)
    for lun in range(5):
        assert not channel.full
        channel.ask(Request(0, lun % 4, 1, done=lambda: done.append(clock.now)))
    assert channel.full
    freed = []
    channel.when_free(lambda: freed.append(clock.now))
    clock.run()
    assert len(done) == 5 and freed == [done[0]] and not channel.full


def test_all_requests_come_through_and_their_own_callbacks_are_called():
    rng, done = np.random.default_rng(1), []
    requests = [
        Request(0, int(rng.integers(16)), int(rng.integers(1, 9)), 1, done=lambda i=i: done.append(i))
        for i in range(500)
    ]
    cycles = channel_cycles(requests, TIMING, 16)
    assert sorted(done) == list(range(500))
    assert cycles > sum(TIMING.data(each.codewords) for each in requests)
    assert channel_cycles([], TIMING, 16) == 0


@pytest.mark.parametrize("change", [{"read_ns": 100_000}, {"link_bytes_per_s": 100_000_000}, {"ccs_ns": 3000}])
def test_slower_parts_never_read_faster(change):
    def cycles(part):
        requests = [Request(0, i % 3, 4, 2) for i in range(100)]
        return channel_cycles(requests, ChannelTiming(part, 100_000_000), 4)

    assert cycles(replace(PART, **change)) > 1.5 * cycles(PART)
