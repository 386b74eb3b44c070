"""A device over a channel: same bits and same errors as at the other end, and frames that are none."""

import os
import struct
import threading
from contextlib import contextmanager, suppress

import numpy as np
import pytest

from nearflash.abi.bitmap import ElementFormat
from nearflash.abi.errors import (
    AddressError,
    CommandError,
    DeviceError,
    DeviceLostError,
    DigestError,
    StreamError,
    UnknownDeviceError,
    WaitTimeoutError,
)
from nearflash.abi.kernel.commands import UpdateCommand
from nearflash.abi.kernel.config import config
from nearflash.abi.optimizers import AdamStep
from nearflash.device.backends.remote import device as subject
from nearflash.device.backends.remote.channel import MAX_PAYLOAD_BYTES, FrameChannel
from nearflash.device.backends.remote.device import RemoteDevice
from nearflash.device.backends.remote.server import make_hello, serve
from nearflash.device.drivers.expand import expand_matrix
from nearflash.device.selftest.bringup import bring_up
from nearflash.device.selftest.update import compare_updates
from nearflash.model.weights.bitmap import pack

devices = pytest.importorskip("nearflash.sim.verilator.device")
SIZES = {"params": 40, "tokens": 20, "columns": 20, "seed": 1}


@contextmanager
def channels():
    """Both ends: this one, and the other."""
    pipes = [os.pipe() for _ in range(2)]
    (to_read, to), (back_read, back) = [(os.fdopen(read, "rb"), os.fdopen(write, "wb")) for read, write in pipes]
    try:
        yield FrameChannel(back_read, to, "`the server`"), FrameChannel(to_read, back, "the machine that asks")
    finally:
        for file in (to, back, to_read, back_read):
            with suppress(OSError):
                file.close()


@contextmanager
def opened(name, opener=devices.VerilatorDevice.open):
    """The device at the other end of a channel, and the one there."""
    there = []
    with channels() as (here, other):

        def run():
            serve(other, config(name), lambda: there.append(opener(name)) or there[0])

        thread = threading.Thread(target=run)
        thread.start()
        try:
            with RemoteDevice("pynq", config(name), here, "board") as device:
                yield device, there[0]
        finally:
            here._writer.close()
            thread.join(30)
    assert not thread.is_alive()


def test_an_update_there_has_the_models_bits_and_the_counters():
    with opened("update-tiny") as (device, there):
        assert device.identity.name == "pynq:update-tiny@board"
        rows = list(compare_updates(device, params=40, seed=1))
        assert len(rows) > 10 and not any(row.mismatches for row in rows)
        assert device.links.to_device == there.links.to_device > 0
        assert device.run_s == there.run_s > 0
        stages = list(bring_up(device, device, **SIZES))
        assert [one.name for one in stages] == ["identity", "registers", "memory", "golden command", "bandwidth"]
        assert all(one.passed for one in stages) and "no window" in stages[2].found
    assert not there._open, "the other end closes its device with the channel"


def test_a_buffer_of_several_frames_goes_both_ways(monkeypatch):
    monkeypatch.setattr(subject, "MAX_PAYLOAD_BYTES", 1000)
    with opened("update-tiny") as (device, there):
        buffer = device.allocate(4500)
        data = np.random.default_rng(1).integers(0, 256, 4500, np.uint8)
        buffer.host[:] = data
        buffer.sync_to_device(10)
        (other,) = there._buffers.values()
        assert (other.p2p[10:] == data[10:]).all() and not other.p2p[:10].any()
        buffer.host[:] = 0
        buffer.sync_from_device(0, 4400)
        assert (buffer.host[10:4400] == data[10:4400]).all() and not buffer.host[4400:].any()
        device.free(buffer)
        assert not there._buffers
        with pytest.raises(AddressError, match="a buffer must fit the largest free range"):
            device.allocate(1 << 40)


def test_errors_come_by_name():
    with opened("expand-tiny") as (device, _):
        stream = bytearray(pack(np.ones((2, 64), np.uint8), ElementFormat.INT8, 2))
        stream[len(stream) // 2] ^= 1
        with pytest.raises(StreamError) as raised:
            expand_matrix(device, bytes(stream))
        assert raised.value.fault
    with opened("update-tiny") as (device, there):
        places = {name: device.allocate(4096).address for name in "gpmv"}
        outputs = {name: places[name] for name in "pmv"}
        with pytest.raises(AddressError, match="must lie in one allocated buffer"):
            device.submit(UpdateCommand(AdamStep(1e-3, 1), 2000, places, outputs))
        there._finish = lambda timeout_s: (_ for _ in ()).throw(WaitTimeoutError(f"waits {timeout_s}"))
        ticket = device.submit(UpdateCommand(AdamStep(1e-3, 1), 100, places, outputs))
        with pytest.raises(WaitTimeoutError, match=r"waits 0\.5"):
            device.wait(ticket, 0.5)
        del there._finish
        assert device.wait(ticket).counters["params_done"] == 100


def test_what_opening_raises_there_is_raised_here():
    def refuse(name):
        raise UnknownDeviceError("device 'pynq' needs a board: PYNQ finds none here")

    with pytest.raises(UnknownDeviceError, match="needs a board: PYNQ finds none here"), opened("update-tiny", refuse):
        pytest.fail("opened")


@pytest.mark.parametrize("field", ["version", "abi", "config", "digest"])
def test_two_versions_do_not_talk(field):
    ours = make_hello(config("update-tiny"))
    for side in ("there", "here"):
        with channels() as (here, other):
            if side == "there":
                here.send(ours | {field: "other"})
                serve(other, config("update-tiny"), lambda: pytest.fail("opened"))
                body, _ = here.receive()
                assert body["error"][0] == "DigestError" and f"{field} of the machine that asks" in body["error"][1]
            else:
                other.send(ours | {field: "other"})
                with pytest.raises(DigestError, match=f"{field} of board must be {ours[field]}, as here, not other"):
                    RemoteDevice("pynq", config("update-tiny"), here, "board")


@pytest.mark.parametrize(
    ("frame", "error", "message"),
    [
        (b"Welcome to PYNQ", DeviceError, "must speak frames, not b'Welcome to P': perhaps its shell prints"),
        (b"", DeviceLostError, "must answer, not end"),
        (struct.pack(">4sII", b"NFD1", 1 << 31, 0), DeviceError, "must keep frames in bounds, not send 2147483648"),
        (struct.pack(">4sII", b"NFD1", 2, MAX_PAYLOAD_BYTES + 1), DeviceError, "must keep frames in bounds"),
        (struct.pack(">4sII", b"NFD1", 2, 0) + b"{]", DeviceError, "must send JSON"),
        (struct.pack(">4sII", b"NFD1", 2, 0) + b"[]", DeviceError, "must send a JSON object"),
        (struct.pack(">4sII", b"NFD1", 9, 0) + b"{}", DeviceLostError, "must answer, not end"),
    ],
)
def test_what_is_no_frame_is_named(frame, error, message):
    with channels() as (here, other):
        other._writer.write(frame)
        other._writer.close()
        with pytest.raises(error, match=message):
            here.receive()


def test_a_frame_past_the_bounds_is_not_sent():
    with channels() as (here, _), pytest.raises(DeviceError, match=r"at most .* of data, not"):
        here.send({}, bytes(MAX_PAYLOAD_BYTES + 1))


@pytest.mark.parametrize(
    ("request_", "name", "message"),
    [
        ({"op": "shell"}, "DeviceError", "op must be one of read, write"),
        ({"op": ["read"]}, "DeviceError", "op must be one of"),
        ({"op": "read", "offset": 0x9000}, "AddressError", "must be one of the kernel's"),
        ({"op": "read", "offset": "0"}, "DeviceError", "offset of a frame must be an integer"),
        ({"op": "write", "offset": 0x10, "value": 1 << 32}, "DeviceError", "value of a frame must be"),
        ({"op": "allocate", "size_bytes": -1}, "DeviceError", "size_bytes of a frame"),
        ({"op": "free", "address": 4096}, "AddressError", "a buffer must be allocated, not at"),
        ({"op": "up", "address": 0, "offset": 0, "size_bytes": 1}, "AddressError", "must be allocated"),
        ({"op": "wait", "timeout_s": "long"}, "DeviceError", "timeout_s of a frame"),
        ({"op": "wait", "timeout_s": 1}, "CommandError", "ticket must be one that was submitted"),
        ({"op": "submit", "registers": 1, "reads": {}, "writes": {}}, "DeviceError", "registers of a frame"),
        ({"op": "submit", "registers": {}, "reads": [], "writes": {}}, "DeviceError", "reads of a frame"),
        ({"op": "submit", "registers": {"status": 1}, "reads": {}, "writes": {}}, "CommandError", "not status: 1"),
        ({"op": "submit", "registers": {"params": 1 << 32}, "reads": {}, "writes": {}}, "CommandError", "not params"),
        ({"op": "submit", "registers": {}, "reads": {"g": [0, 9]}, "writes": {}}, "AddressError", "one allocated"),
    ],
)  # fmt: skip
def test_a_request_that_is_none_changes_nothing(request_, name, message):
    with opened("update-tiny") as (device, there):
        device._channel.send(request_)
        body, _ = device._channel.receive()
        assert body["error"][0] == name and message in body["error"][1], body
        assert not there._running and not there._buffers


def test_the_other_end_is_gone():
    with channels() as (here, other):
        other._writer.close()
        with pytest.raises(DeviceLostError, match="`the server` must answer, not end"):
            RemoteDevice("pynq", config("update-tiny"), here, "board")


def test_the_command_of_ssh(monkeypatch, tmp_path):
    """A login shell of root, where PYNQ's image has its environment; the user may name another command."""
    log = tmp_path / "log.json"
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\nfor one; do echo "$one"; done >{log}\nexit 255\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    for environment, command in (
        ({}, "sudo -n bash -lc 'exec nearflash device-server \"$0\"' pynq:update-tiny"),
        (
            {"NEARFLASH_DEVICE_SERVER": "board/nearflash device-server"},
            "board/nearflash device-server pynq:update-tiny",
        ),
    ):
        with pytest.raises(DeviceLostError, match="on me@board must answer, not end"):
            RemoteDevice.connect("pynq", "update-tiny", "me@board", environment)
        *options, dashes, host, asked = log.read_text().splitlines()
        assert (dashes, host, asked) == ("--", "me@board", command)
        assert options == ["-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3"]
    log.unlink()
    for host in ("-oProxyCommand=x", "a b", "", "a;b"):
        with pytest.raises(CommandError, match="host must be USER@HOST or HOST"):
            RemoteDevice.connect("pynq", "update-tiny", host)
    assert not log.exists()
