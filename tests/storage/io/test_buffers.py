"""Buffers that are used again, and never by two at once."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from nearflash.storage.io.buffers import BufferPool


def test_a_buffer_is_used_again():
    pool = BufferPool()
    with pool.take(8192) as first:
        assert first.nbytes == 8192 and first.ctypes.data % 4096 == 0
        with pool.take(8192) as second, pool.take(4096) as third:
            assert second is not first and third.nbytes == 4096
    with pool.take(8192) as again, pool.take(8192) as other:
        assert {id(again), id(other)} == {id(first), id(second)}


def test_it_comes_back_after_an_error():
    pool = BufferPool()
    with pytest.raises(ValueError), pool.take(4096) as first:
        raise ValueError
    with pool.take(4096) as again:
        assert again is first


def test_no_two_threads_have_the_same():
    pool = BufferPool()

    def use(number):
        with pool.take(4096) as memory:
            memory[:] = number
            time.sleep(0.001)
            return (memory == number).all()

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(use, range(64)))
