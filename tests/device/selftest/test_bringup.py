"""Bring-up stops at the first stage that fails, and names what to check."""

from dataclasses import replace

import pytest

from nearflash.device import open_device
from nearflash.device.selftest.bringup import STAGES, bring_up
from nearflash.device.selftest.clock import measure_clock
from nearflash.model.weights import bitmap

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
    names = [name for name, *_ in STAGES if name not in ("clock", "products")]  # no clock of the host's; of expand
    assert [one.name for one in found] == names and all(one.passed for one in found)
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

    monkeypatch.setattr(device, "_start", lambda command: start(replace(command, params=3)))
    failed(device, 3, "must equal the model, not differ")


def test_multipliers_that_ignore_an_operand_are_seen(monkeypatch):
    """As with DSP slices whose pins nothing drives: the first formats of expand pass no multiplier."""
    with open_device("model:expand-tiny") as device:
        found = {one.name: one for one in stages(device)}
        assert found["products"].passed and found["products"].found == "4 scaled formats: 400 words equal the model"
        exact, expand = bitmap.dequantize, device._expand

        def ignorant(stream, out):
            with monkeypatch.context() as changed:
                changed.setattr(bitmap, "dequantize", lambda codes, *rest: exact(codes & 0, *rest))
                return expand(stream, out)

        monkeypatch.setattr(device, "_expand", ignorant)
        *passed, last = stages(device)
    assert [one.name for one in passed] == ["identity", "memory", "golden command"] and all(
        one.passed for one in passed
    )
    assert last.name == "products" and not last.passed
    assert last.found.startswith("int8 to fp16 must equal the model, not differ: 3")
    assert "pins of DSP slices that nothing drives" in last.found


class Clocked:
    """A device whose commands take as long as a clock of `hz` makes them."""

    def __init__(self, device, hz):
        self.device, self.hz = device, hz

    def now(self):
        return self.device.kernel.cycles / self.hz


@pytest.mark.parametrize(("hz", "passed"), [(100e6, True), (95e6, True), (80e6, False), (111e6, False)])
def test_the_clock_is_measured_by_the_kernels_cycles(opened, monkeypatch, hz, passed):
    opened.reset()
    for name, value in {"clock_hz": 100_000_000, "clock_run_s": 20e-6, "now": Clocked(opened, hz).now}.items():
        monkeypatch.setattr(opened, name, value)
    first, second, *_ = bring_up(opened, opened, **SIZES)
    assert (first.name, second.name, second.passed) == ("identity", "clock", passed)
    assert passed or second.found.startswith("the clock must be 100.0 MHz, not ")


@pytest.mark.parametrize("config", ["expand-tiny", "attend-tiny"])
def test_every_kernel_has_a_command_to_measure_its_clock_with(config):
    with devices.VerilatorDevice.open(config) as device:
        device.clock_hz, device.clock_run_s, device.now = 100_000_000, 100e-6, Clocked(device, 100e6).now
        cycles, seconds = measure_clock(device)
    assert seconds >= 100e-6 and 0.9 < cycles / seconds / 100e6 <= 1
