"""Bring-up stops at the first stage that fails, and names what to check."""

import pytest

from nearflash.device.selftest.bringup import STAGES, bring_up

devices = pytest.importorskip("nearflash.sim.verilator.device")
SIZES = {"params": 40, "tokens": 20, "columns": 20, "seed": 1}


@pytest.fixture(scope="module")
def opened():
    with devices.VerilatorDevice.open("update-tiny") as device:
        yield device


@pytest.fixture
def device(opened):
    opened.reset()
    yield opened
    opened.reset()


def stages(device):
    return list(bring_up(device, device, **SIZES))


def test_every_stage_passes_on_a_kernel_that_works(device):
    before = device.read("params")
    found = stages(device)
    assert [one.name for one in found] == [name for name, *_ in STAGES] and all(one.passed for one in found)
    assert found[0].found.startswith("verilator:update-tiny, abi ") and "26 writable registers" in found[1].found
    assert "window for direct I/O reads the same" in found[2].found and "words equal the model" in found[3].found
    assert device.read("params") in (before, 40), "registers hold again what they held"


def failed(device, at, match):
    found = stages(device)
    assert [one.passed for one in found] == [True] * at + [False]
    assert match in found[-1].found and "; check " in found[-1].found


def test_a_register_that_forgets(device, monkeypatch):
    write, offset = device.write_register, device._map["eps"].offset
    monkeypatch.setattr(device, "write_register", lambda at, value: at == offset or write(at, value))
    failed(device, 1, "register eps must hold what is written")


def test_registers_that_share_a_place(device, monkeypatch):
    write, read = device.write_register, device.read_register
    one, other = device._map["decay"].offset, device._map["eps"].offset
    monkeypatch.setattr(device, "write_register", lambda at, value: write(one if at == other else at, value))
    monkeypatch.setattr(device, "read_register", lambda at: read(one if at == other else at))
    failed(device, 1, "while others are written")


def test_memory_that_is_another(device, monkeypatch):
    from nearflash.device.memory import SimulatedBuffer

    sync = SimulatedBuffer.sync_from_device

    def shifted(self, offset=0, size_bytes=None):
        sync(self, offset, size_bytes)
        self.host[-1] ^= 1

    monkeypatch.setattr(SimulatedBuffer, "sync_from_device", shifted)
    failed(device, 2, "not wrong in 1 bytes from byte 0 on")


def test_a_kernel_that_computes_otherwise(device, monkeypatch):
    start = device._start

    def other(command):
        start(command)
        device.write("eps", 0x7FC0_0000)
        device.write("params", 3)

    monkeypatch.setattr(device, "_start", lambda command: start(type(command)(**{**vars(command), "params": 3})))
    failed(device, 3, "must equal the model, not differ")
