"""What is the host device's own: threads, timeouts, abort. Its bits are compared in tests/system."""

import threading

import pytest

from nearflash.abi.commands import CopyFormat, UpdateCommand
from nearflash.abi.errors import CommandError, WaitTimeoutError
from nearflash.abi.rules import AdamStep
from nearflash.device.host import THREADS, HostDevice
from nearflash.device.memory import SimulatedMemory
from nearflash.device.vector_lane import BLOCK_PARAMS

PARAMS = THREADS * BLOCK_PARAMS + 5


@pytest.fixture
def host():
    with HostDevice.open("update-tiny") as device:
        yield device


def in_place(device, params=PARAMS) -> UpdateCommand:
    state = {name: device.allocate(4 * params).address for name in ("p", "m", "v")}
    return UpdateCommand(AdamStep(1e-3, 1), params, state | {"g": device.allocate(4 * params).address}, state)


def test_a_slow_update_times_out_and_can_be_waited_for_again(host, monkeypatch):
    gate, work = threading.Event(), host._work
    monkeypatch.setattr(host, "_work", lambda *arguments: gate.wait(30) and work(*arguments))
    ticket = host.submit(in_place(host))
    with pytest.raises(WaitTimeoutError, match=f"update of {PARAMS} parameters must end within 0.01 s; it still runs"):
        host.wait(ticket, timeout_s=0.01)
    gate.set()
    assert host.wait(ticket).counters["params_done"] == PARAMS


def test_reset_aborts_between_blocks(host, monkeypatch):
    gate, work = threading.Event(), host._work

    def aborted(*arguments):
        gate.set()
        host._aborted.wait(30)
        return work(*arguments)

    command = in_place(host)
    with monkeypatch.context() as patch:
        patch.setattr(host, "_work", aborted)
        ticket = host.submit(command)
        assert gate.wait(30)
        host.reset()
    with pytest.raises(CommandError, match="ticket must be one"):
        host.wait(ticket)
    assert host.run(command).counters["params_done"] == PARAMS


def test_counts_add_up_over_threads(host):
    buffers = [host.allocate(4 * PARAMS) for _ in range(5)]
    for buffer, value in zip(buffers, (float("inf"), 1e6, 0, 0), strict=False):
        buffer.host.view("<f4")[:] = value
        buffer.sync_to_device()
    g, *rest = (buffer.address for buffer in buffers)
    outputs = dict(zip(("p", "m", "v", "copy"), rest, strict=True))
    inputs = {"g": g} | {name: outputs[name] for name in ("p", "m", "v")}
    command = UpdateCommand(AdamStep(0.0, 1), PARAMS, inputs, outputs, CopyFormat.FP16)
    assert host.run(command).counters["nonfinite_gradients"] == PARAMS
    buffers[0].host[:] = 0
    for buffer in buffers[:4]:
        buffer.sync_to_device()
    assert host.run(command).counters["copy_overflows"] == PARAMS


def test_memory_may_be_the_callers():
    memory = SimulatedMemory(1 << 20)
    with HostDevice(HostDevice.open("update-tiny").identity.config, memory) as device:
        buffer = device.allocate(64)
        buffer.host[:] = 5
        buffer.sync_to_device()
        assert memory.storage[:65].tolist() == [5] * 64 + [0]
