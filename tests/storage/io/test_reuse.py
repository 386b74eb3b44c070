"""Memory that is used again: never while anything refers to it."""

import gc
import mmap
import threading

import numpy as np

from nearflash.storage.io import reuse
from nearflash.storage.io.reuse import reuse_buffer


def address(array):
    return array.__array_interface__["data"][0]


def test_free_memory_is_used_again_and_is_aligned():
    first = reuse_buffer(300_000)
    place = address(first)
    assert place % 4096 == 0 and first.shape == (300_000,) and first.flags.writeable
    del first
    assert address(reuse_buffer(400_000)) == place, "of the same power of two"
    assert reuse_buffer(0).shape == (0,)


def test_memory_is_not_used_again_while_a_view_of_a_view_lives():
    first = reuse_buffer(1 << 20)
    place = address(first)
    view = first.reshape(16, -1)[3:, 8:].view(np.float16)[::2]
    view[:] = 7
    del first
    gc.collect()
    others = [reuse_buffer(1 << 20) for _ in range(4)]
    for other in others:
        other[:] = 1
    assert place not in map(address, others) and (view == 7).all()
    del view
    assert address(reuse_buffer(1 << 20)) == place


def test_large_memory_is_given_back():
    for size in ((1 << 24) - 1, 1 << 24, (1 << 24) + 1):
        large = reuse_buffer(size)
        assert large.shape == (size,) and address(large) % 4096 == 0


def test_threads_never_share_memory():
    wrong = []

    def work(number):
        for turn in range(300):
            mine = reuse_buffer(70_000 + turn)
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


def test_small_arrays_share_a_huge_page_and_large_ones_begin_one():
    small = [reuse_buffer(1 << 17) for _ in range(17)]
    pages = {address(one) >> 21 for one in small}
    assert len({address(one) for one in small}) == 17 and 2 <= len(pages) <= 3
    assert address(reuse_buffer(3 << 20)) % (1 << 21) == 0


def test_a_kernel_without_huge_pages_gives_plain_ones(monkeypatch):
    class Plain(mmap.mmap):
        def madvise(self, *_):
            raise OSError("no huge pages")

    monkeypatch.setattr(reuse.mmap, "mmap", Plain)
    (array,) = reuse._in_huge_pages(1 << 22)
    array[:] = 3
    assert array.shape == (1 << 22,) and int(array[-1]) == 3
