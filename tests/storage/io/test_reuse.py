"""Memory that is used again: never while anything refers to it."""

import gc
import threading

import numpy as np

from nearflash.storage.io.reuse import reused_buffer


def address(array):
    return array.__array_interface__["data"][0]


def test_free_memory_is_used_again_and_is_aligned():
    first = reused_buffer(300_000)
    place = address(first)
    assert place % 4096 == 0 and first.shape == (300_000,) and first.flags.writeable
    del first
    assert address(reused_buffer(400_000)) == place, "of the same power of two"
    assert reused_buffer(0).shape == (0,)


def test_memory_is_not_used_again_while_a_view_of_a_view_lives():
    first = reused_buffer(1 << 20)
    place = address(first)
    view = first.reshape(16, -1)[3:, 8:].view(np.float16)[::2]
    view[:] = 7
    del first
    gc.collect()
    others = [reused_buffer(1 << 20) for _ in range(4)]
    for other in others:
        other[:] = 1
    assert place not in map(address, others) and (view == 7).all()
    del view
    assert address(reused_buffer(1 << 20)) == place


def test_large_memory_is_given_back():
    for size in ((1 << 24) - 1, 1 << 24, (1 << 24) + 1):
        large = reused_buffer(size)
        assert large.shape == (size,) and address(large) % 4096 == 0


def test_threads_never_share_memory():
    wrong = []

    def work(number):
        for turn in range(300):
            mine = reused_buffer(70_000 + turn)
            mine[:] = number
            other = mine[10:].reshape(-1)
            del mine
            if not (other == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
