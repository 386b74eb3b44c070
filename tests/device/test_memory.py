import mmap
import os
import subprocess
import sys

import numpy as np
import pytest

from nearflash.abi.errors import AddressError
from nearflash.device.base import LinkBytes
from nearflash.device.memory import PAGE_BYTES, SimulatedMemory, anonymous


@pytest.mark.parametrize("size_bytes", [1, PAGE_BYTES, (2 << 20) - 1, 2 << 20, (5 << 20) + 3])
def test_memory_of_any_size_is_page_aligned_and_zero(size_bytes):
    """From 2 MiB on it is in huge pages, of which no more is seen than was asked for."""
    memory = anonymous(size_bytes)
    assert memory.size == size_bytes and memory.ctypes.data % PAGE_BYTES == 0 and not memory.any()
    memory[:] = 1
    assert memory.sum() == size_bytes


def test_host_and_device_are_different_bytes_until_a_sync():
    links = LinkBytes()
    buffer = SimulatedMemory(16 * PAGE_BYTES).allocate(100, links)
    buffer.host[:] = 7
    assert not buffer.p2p.any()
    buffer.sync_to_device(10, 20)
    assert buffer.p2p.tolist() == [0] * 10 + [7] * 20 + [0] * 70
    buffer.p2p[:] = 9
    buffer.sync_from_device(90)
    assert buffer.host.tolist() == [7] * 90 + [9] * 10
    assert links == LinkBytes(to_device=20, from_device=10)


def test_views_are_page_aligned():
    memory = SimulatedMemory(16 * PAGE_BYTES)
    for size_bytes in (1, PAGE_BYTES + 1):
        buffer = memory.allocate(size_bytes, LinkBytes())
        assert buffer.host.size == buffer.p2p.size == buffer.size_bytes == size_bytes
        assert buffer.address % mmap.PAGESIZE == 0
        assert buffer.host.ctypes.data % mmap.PAGESIZE == buffer.p2p.ctypes.data % mmap.PAGESIZE == 0


def test_a_span_outside_the_buffer_moves_nothing():
    links = LinkBytes()
    buffer = SimulatedMemory(PAGE_BYTES).allocate(100, links)
    for offset, size_bytes in ((0, 101), (-1, 5), (101, None), (50, 51)):
        with pytest.raises(AddressError, match="range must lie in the buffer's 100 bytes"):
            buffer.sync_to_device(offset, size_bytes)
        with pytest.raises(AddressError, match="range must lie in the buffer's 100 bytes"):
            buffer.sync_from_device(offset, size_bytes)
    assert links == LinkBytes()


def test_first_fit_reuses_and_merges():
    memory = SimulatedMemory(8 * PAGE_BYTES)
    buffers = [memory.allocate(2 * PAGE_BYTES, LinkBytes()) for _ in range(4)]
    assert [b.address // PAGE_BYTES for b in buffers] == [1, 3, 5, 7]
    with pytest.raises(AddressError, match="largest free range of the device memory, 0 of 32768 bytes, not 1"):
        memory.allocate(1, LinkBytes())
    memory.free(buffers[2])
    memory.free(buffers[0])
    with pytest.raises(AddressError, match=r"8192 of 32768 bytes, not 8193; free other buffers first"):
        memory.allocate(2 * PAGE_BYTES + 1, LinkBytes())
    assert memory.allocate(1, LinkBytes()).address == buffers[0].address
    memory.free(buffers[1])
    assert memory.allocate(5 * PAGE_BYTES, LinkBytes()).address == buffers[0].address + PAGE_BYTES


def test_random_allocations_never_overlap():
    rng = np.random.default_rng(1)
    memory = SimulatedMemory(64 * PAGE_BYTES)
    held = []
    for i in range(400):
        if held and rng.random() < 0.5:
            buffer, mark = held.pop(rng.integers(len(held)))
            assert (buffer.p2p == mark).all()
            memory.free(buffer)
            continue
        try:
            buffer = memory.allocate(int(rng.integers(1, 6 * PAGE_BYTES)), LinkBytes())
        except AddressError:
            continue
        buffer.p2p[:] = i % 251
        held.append((buffer, i % 251))
    for buffer, _ in held:
        memory.free(buffer)
    assert memory.allocate(memory.size_bytes, LinkBytes()).address == memory.base


def test_freed_twice():
    memory = SimulatedMemory(PAGE_BYTES)
    buffer = memory.allocate(1, LinkBytes())
    memory.free(buffer)
    with pytest.raises(AddressError, match="must be allocated to be freed, not at 0x1000"):
        memory.free(buffer)


@pytest.mark.parametrize("size_bytes", [0, -1])
def test_empty_buffers_are_refused(size_bytes):
    with pytest.raises(AddressError, match=f"at least 1 byte, not {size_bytes}"):
        SimulatedMemory(PAGE_BYTES).allocate(size_bytes, LinkBytes())


def test_memory_of_a_simulator_is_shared():
    storage = anonymous(4 * PAGE_BYTES)
    memory = SimulatedMemory(storage=storage, base=1 << 32)
    buffer = memory.allocate(8, LinkBytes())
    buffer.p2p[:] = 3
    assert buffer.address == 1 << 32 and storage[:9].tolist() == [3] * 8 + [0]
    with pytest.raises(AddressError, match="multiples of 4096"):
        SimulatedMemory(storage=storage[8:])


FORK_BESIDE_DEVICES = """
import os
from nearflash.device.memory import DEFAULT_BYTES, SimulatedMemory
ram_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
memories = [SimulatedMemory() for _ in range(ram_bytes // DEFAULT_BYTES + 2)]
child = os.fork()
if not child:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_process_with_more_simulated_memory_than_ram_can_fork():
    """Once ENOMEM, for every subprocess and data loader beside six open devices on 24 GiB."""
    done = subprocess.run([sys.executable, "-c", FORK_BESIDE_DEVICES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
