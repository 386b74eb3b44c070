"""Events before a channel: walkers, queues of the index, servers."""

import pytest

from nearflash.sim.nand.parts import nand_part
from nearflash.verify.bench.channel_events import IndexQueue, Server, Walker
from nearflash.verify.fixtures.nand_channel import ChannelEvents, ChannelTiming, EventClock, Request


@pytest.fixture
def timing():
    return ChannelTiming(nand_part("slc-1400").timing, 285_000_000)


def test_a_server_takes_one_at_a_time():
    clock, ends = EventClock(), []
    server = Server(clock)
    assert server.serve(10, lambda: ends.append(clock.now)) == 0
    assert server.serve(5, lambda: ends.append(clock.now)) == 10
    clock.at(100, lambda: server.serve(1, lambda: ends.append(clock.now)))
    clock.run()
    assert ends == [10, 15, 101]


def test_a_block_that_waits_for_its_buffer_holds_back_no_other_channel(timing):
    clock, ends = EventClock(), []
    channels = [ChannelEvents(clock, timing, luns=4) for _ in range(2)]
    queues = [IndexQueue(channel, buffers=1) for channel in channels]
    steps = [(0, 0, True), (0, 1, False), (0, 2, True), (1, 0, True)]  # channel, lun, first of its block
    requests = [
        Request(channel, lun, 1, done=lambda i=i: ends.append((i, clock.now)), initial=initial)
        for i, (channel, lun, initial) in enumerate(steps)
    ]
    Walker(clock, queues).walk([(10, request) for request in requests], lambda: None)
    clock.at(5000, queues[0].give_back)
    clock.run()
    assert [i for i, _ in ends] == [0, 3, 1, 2]
    assert ends[2][1] < 3000 and 5000 < ends[3][1] < 7000


def test_a_walker_waits_for_a_place_in_the_queue_and_the_queue_for_one_in_the_channel(timing):
    clock, ends, walked = EventClock(), [], []
    queue = IndexQueue(ChannelEvents(clock, timing, luns=4), buffers=1)
    requests = [Request(0, i % 4, 1, done=lambda: ends.append(clock.now), initial=i == 0) for i in range(150)]
    Walker(clock, [queue]).walk([(1, request) for request in requests], lambda: walked.append(clock.now))
    clock.run()
    assert len(ends) == 150 and 0 < walked[0] < ends[150 - 64], "64 places in the channel, 64 in the queue"
