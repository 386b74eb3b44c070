"""Order, ending, aborting and the measured waits of a channel."""

import threading
import time

from nearflash.support.queues import WorkQueue


def later(action, delay_s=0.02):
    timer = threading.Timer(delay_s, action)
    timer.start()
    return timer


def test_items_come_in_order_and_then_the_end():
    channel = WorkQueue([1, 2], producers=2)
    channel.put(3)
    channel.end()
    assert [channel.get() for _ in range(3)] == [1, 2, 3]
    later(channel.end)
    assert channel.get() is None, "when the second producer has ended too"
    assert channel.get() is None


def test_the_newest_item_comes_first_where_that_is_wanted():
    channel = WorkQueue([1, 2], newest_first=True)
    channel.put(3)
    assert [channel.get() for _ in range(3)] == [3, 1, 2]


def test_preferred_items_come_first():
    channel = WorkQueue([1, 2, 3, 4])
    assert channel.get(prefer=lambda item: item % 2 == 0) == 2
    assert channel.get(prefer=lambda item: item > 4) == 1


def test_an_abort_wakes_the_waiting_and_drops_what_comes():
    channel = WorkQueue[int]()
    later(channel.abort)
    assert channel.get() is None
    channel.put(1)
    channel.end()
    assert channel.get() is None


def test_waits_are_measured():
    channel = WorkQueue[int]()
    timer = later(lambda: channel.put(1), 0.05)
    assert channel.get() == 1
    timer.join()
    assert 0.04 < channel.waited_s < 5
    began = time.perf_counter()
    later(channel.measure, 0.05)
    later(lambda: channel.put(2), 0.1)
    assert channel.get() == 2
    assert 0 < channel.waited_s < time.perf_counter() - began - 0.04, "from the call of measure on"
