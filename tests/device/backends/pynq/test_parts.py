"""Parts of the PYNQ driver that need no PYNQ: buffers, the interrupt's file, what is missing."""

import builtins
import os
import socket
import types
from pathlib import Path

import numpy as np
import pytest

from nearflash.abi.errors import AddressError, UnknownDeviceError
from nearflash.device.backends.pynq import device as driver
from nearflash.device.backends.pynq.device import PynqDevice
from nearflash.device.backends.pynq.interrupt import UioInterrupt
from nearflash.device.backends.pynq.memory import PynqMemory
from nearflash.device.base import LinkBytes


class Array(np.ndarray):
    """An array with a physical address, that notes what is called."""

    def __new__(cls, size, address):
        self = np.zeros(size, np.uint8).view(cls)
        self.device_address, self.calls = address, []
        return self

    def __array_finalize__(self, other):
        self.calls = getattr(other, "calls", [])

    def flush(self):
        self.calls.append("flush")

    def invalidate(self):
        self.calls.append("invalidate")

    def freebuffer(self):
        self.calls.append("free")


@pytest.fixture
def memory():
    made = []

    def allocate(size):
        if size > 1 << 16:
            raise RuntimeError("Allocate failed")
        made.append(Array(size, 0x1000_0000 + sum(map(len, made))))
        return made[-1]

    one = PynqMemory(allocate, 1 << 16, p2p=True)
    one.made = made
    return one


def test_syncs_copy_flush_and_invalidate(memory):
    links = LinkBytes()
    buffer = memory.allocate(100, links)
    assert (buffer.address, len(memory.made[0]), buffer.p2p.size, buffer.host.size) == (0x1000_0000, 4096, 100, 100)
    buffer.host[:] = 5
    buffer.sync_to_device(10, 20)
    assert buffer.p2p.sum() == 100 and buffer.p2p[10:30].all()
    buffer.p2p[:] = 9
    buffer.sync_from_device(90)
    assert buffer.host.tolist() == [5] * 90 + [9] * 10
    assert memory.made[0].calls == ["flush", "invalidate"] and links == LinkBytes(to_device=20, from_device=10)
    with pytest.raises(AddressError, match="must lie in the buffer's 100 bytes"):
        buffer.sync_to_device(0, 101)


def test_buffers_are_freed_once_and_all_at_the_end(memory):
    first, second = (memory.allocate(1, LinkBytes()) for _ in range(2))
    memory.free(first)
    with pytest.raises(AddressError, match="must be allocated to be freed"):
        memory.free(first)
    memory.close()
    memory.close()
    assert [one.calls for one in memory.made] == [["free"], ["free"]] and second.array is memory.made[1]


def test_too_much_and_too_little(memory):
    with pytest.raises(
        AddressError, match=r"must fit what is left of the contiguous memory .*Allocate failed; free other"
    ):
        memory.allocate(1 << 20, LinkBytes())
    with pytest.raises(AddressError, match="at least 1 byte, not 0"):
        memory.allocate(0, LinkBytes())


def test_without_a_window():
    buffer = PynqMemory(lambda size: Array(size, 0), 1 << 16, p2p=False).allocate(8, LinkBytes())
    buffer.host[:] = 1
    buffer.sync_to_device()
    assert buffer.p2p is None and memoryview(buffer.array)[0] == 1


def test_an_interrupt_is_unmasked_then_waited_for(monkeypatch):
    ours, theirs = socket.socketpair()
    opened = ours.detach()
    monkeypatch.setattr(os, "open", lambda path, flags: opened)
    interrupt = UioInterrupt(Path("/dev/uio0"))
    monkeypatch.undo()
    assert interrupt.wait(0.001) is False and theirs.recv(4) == b"\1\0\0\0"
    theirs.send(b"\7\0\0\0")
    assert interrupt.wait(10) is True and theirs.recv(4) == b"\1\0\0\0"
    assert interrupt.wait(0.001) is False, "one interrupt wakes once"
    interrupt.close()
    assert theirs.recv(8) == b"\1\0\0\0" and theirs.recv(4) == b""
    theirs.close()


def test_no_file_of_an_interrupt_means_polling(tmp_path):
    def absent(name):
        raise FileNotFoundError("/sys/class/uio")

    for find in (absent, lambda name: None, lambda name: str(tmp_path / "uio9")):
        assert driver._interrupt(types.SimpleNamespace(uio=types.SimpleNamespace(get_uio_device=find))) is None


def test_pynq_is_missing(monkeypatch):
    imported = builtins.__import__

    def refuse(name, *arguments, **options):
        if name == "pynq":
            raise ModuleNotFoundError("No module named 'pynq'", name="pynq")
        return imported(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    for call in (PynqDevice.presence, lambda: PynqDevice.open("update-tiny")):
        with pytest.raises(UnknownDeviceError, match=r"'pynq' needs the package 'pynq': run on a board.*pip install"):
            call()


def test_pynq_that_this_python_cannot_import(monkeypatch):
    imported = builtins.__import__

    def refuse(name, *arguments, **options):
        if name == "pynq":
            raise ValueError("mutable default <class 'dict'> for field x is not allowed")
        return imported(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(
        UnknownDeviceError, match=r"a PYNQ that this Python can import: mutable .*the image's own Python"
    ):
        PynqDevice.presence()


def test_a_machine_that_is_no_board(monkeypatch):
    class Device:
        @property
        def active_device(self):
            raise RuntimeError("No Devices Found")

    monkeypatch.setattr(driver, "_pynq", lambda: types.SimpleNamespace(Device=Device()))
    with pytest.raises(UnknownDeviceError, match="needs a board: PYNQ finds none here; run as root"):
        PynqDevice.presence()
