"""Events of a channel, against times worked out by hand."""

from dataclasses import replace

import pytest

from nearflash.sim.bench.channel_events import Channel, ChannelTiming, Clock, IndexQueue, Request, Server, Walker
from nearflash.sim.nand.parts import nand_part


@pytest.fixture
def timing():
    timing = ChannelTiming(nand_part("slc-1400"), 285_000_000)
    timing.sense, timing.cache = 1000.0, 100.0
    return timing


def run(timing, requests, *, cached=False):
    """Times at which requests (lun, link cycles, lane cycles), all asked for at 0, are done; and the channel."""
    clock, times = Clock(), [0.0] * len(requests)
    channel = Channel(clock, timing, luns=4, cached=cached)
    for i, (lun, link, lanes) in enumerate(requests):
        channel.ask(Request(0, lun, link, lanes, lambda i=i: times.__setitem__(i, clock.now)))
    clock.run()
    return times, channel


def test_one_page(timing):
    times, channel = run(timing, [(0, 70, 30)])
    assert times == [1070] and (channel.link_cycles, channel.lane_cycles) == (70, 30)


def test_units_sense_together_and_share_the_link(timing):
    assert run(timing, [(0, 70, 0), (1, 50, 0), (2, 20, 0)])[0] == [1070, 1120, 1140]


def test_a_unit_holds_its_page_until_it_is_read_out(timing):
    assert run(timing, [(0, 70, 0), (0, 70, 0)])[0] == [1070, 2140]


def test_with_cache_reads_a_unit_senses_while_its_last_page_is_read_out(timing):
    assert run(timing, [(0, 70, 0), (0, 70, 0)], cached=True)[0] == [1170, 2170]
    assert run(timing, [(0, 1500, 0), (0, 70, 0), (0, 70, 0)], cached=True)[0] == [2600, 2770, 3770]


def test_slow_lanes_hold_the_link(timing):
    assert run(timing, [(0, 50, 200), (1, 50, 200)])[0] == [1200, 1400]


def test_a_server_takes_one_at_a_time():
    clock, ends = Clock(), []
    server = Server(clock)
    assert server.serve(10, lambda: ends.append(clock.now)) == 0
    assert server.serve(5, lambda: ends.append(clock.now)) == 10
    clock.at(100, lambda: server.serve(1, lambda: ends.append(clock.now)))
    clock.run()
    assert ends == [10, 15, 101]


def test_a_block_that_waits_for_its_buffer_holds_back_no_other_channel(timing):
    clock, ends = Clock(), []
    channels = [Channel(clock, timing, luns=4) for _ in range(2)]
    queues = [IndexQueue(channel, buffers=1) for channel in channels]
    steps = [(0, 0, True), (0, 1, False), (0, 2, True), (1, 0, True)]  # channel, lun, first of its block
    requests = [
        Request(channel, lun, 70, 0, lambda i=i: ends.append((i, clock.now)), initial)
        for i, (channel, lun, initial) in enumerate(steps)
    ]
    Walker(clock, queues).walk([(10, request) for request in requests], lambda: None)
    clock.at(5000, queues[0].give_back)
    clock.run()
    assert ends == [(0, 1080), (3, 1110), (1, 1150), (2, 6070)]


def test_a_walker_waits_for_a_place_in_the_queue_and_the_queue_for_one_in_the_channel(timing):
    clock, ends, walked = Clock(), [], []
    queue = IndexQueue(Channel(clock, timing, luns=4), buffers=1)
    requests = [Request(0, i % 4, 70, 0, lambda: ends.append(clock.now), i == 0) for i in range(150)]
    Walker(clock, [queue]).walk([(1, request) for request in requests], lambda: walked.append(clock.now))
    clock.run()
    assert len(ends) == 150 and 0 < walked[0] < ends[150 - 64], "64 places in the channel, 64 in the queue"


def test_times_of_a_part():
    part = nand_part("slc-1400")
    timing = ChannelTiming(part, 285_000_000)
    assert timing.sense == 4000 * 0.285 + 16
    column = timing.link(2, 2) - timing.link(2, 1)
    assert timing.link(2, 1) > 2 * column, "a page is sensed, asked for its status, and named"
    codeword = timing.link(2, 1) - timing.link(1, 1)
    assert codeword == pytest.approx(552 / 1.4e9 * 285e6)
    fast = replace(part, timing=replace(part.timing, link_bytes_per_s=4_800_000_000))
    timing = ChannelTiming(fast, 285_000_000)
    assert timing.link(2, 1) - timing.link(1, 1) == pytest.approx(69), "8 bytes a clock"
