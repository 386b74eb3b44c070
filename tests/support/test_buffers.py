"""Buffers go round: each one thread's at a time, none twice; whoever waits when the pool is closed gets an error."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from nearflash.abi.errors import CommandError
from nearflash.support.buffers import BufferPool


def test_a_buffer_is_waited_for():
    pool = BufferPool("tests", ["a"])
    assert pool.acquire() == "a"
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(pool.acquire)
        assert not waiting.done()
        pool.release("a")
        assert waiting.result(10) == "a"


def test_their_order():
    oldest, newest = BufferPool("tests", "abc"), BufferPool("tests", "abc", newest_first=True)
    for pool, expected in ((oldest, "bca"), (newest, "abc")):
        pool.release(pool.acquire())
        assert "".join(pool.acquire() for _ in range(3)) == expected
    assert BufferPool("tests", "abc").acquire(prefer=lambda buffer: buffer == "b") == "b"


def test_a_block_that_raises_releases_its_buffer():
    pool = BufferPool("tests", ["a"])
    with pytest.raises(ZeroDivisionError), pool.fill() as buffer:
        assert buffer == "a"
        raise ZeroDivisionError
    with pool.fill():
        pass
    with pytest.raises(CommandError), ThreadPoolExecutor(1) as other:
        waiting = other.submit(pool.acquire)
        assert not waiting.done(), "whoever filled it has it"
        pool.close()
        waiting.result(10)


def test_one_too_many_is_rejected():
    pool = BufferPool("tests", "ab")
    pool.acquire()
    pool.release("a")
    with pytest.raises(ValueError, match="a buffer of tests must be released once, not again"):
        pool.release("a")


def test_closing_ends_all_waits_and_keeps_the_first_error():
    pool, first = BufferPool("tests", ["a"]), OSError("the first")
    buffer = pool.acquire()
    with ThreadPoolExecutor(3) as others:
        waiting = [others.submit(pool.acquire) for _ in range(3)]
        pool.close(first)
        pool.close(OSError("the second"))
        pool.close()
        assert [job.exception(10) for job in waiting] == [first] * 3
    pool.release(buffer)
    with pytest.raises(OSError, match="the first"):
        pool.acquire()


def test_closed_without_an_error():
    pool = BufferPool("tests", ["a"])
    pool.close()
    with pytest.raises(CommandError, match="tests must be open, not closed"):
        pool.acquire()


def test_an_error_comes_with_the_traceback_of_its_own_thread_however_often_it_is_raised():
    pool = BufferPool("tests", ["a"])

    def break_it():
        try:
            raise OSError("no")
        except OSError as error:
            pool.close(error)

    thread = threading.Thread(target=break_it)
    thread.start()
    thread.join(10)
    lengths = set()
    for _ in range(3):
        with pytest.raises(OSError, match="no") as caught:
            pool.acquire()
        assert caught.traceback[-1].name == "break_it"
        lengths.add(len(caught.traceback))
    assert len(lengths) == 1
