import json
import os
import stat

import numpy as np
import pytest

from nearflash.abi.errors import AddressError, CommandError, DigestError, ReplayError, StreamError, UnknownDeviceError
from nearflash.abi.kernel.commands import CopyFormat, UpdateCommand
from nearflash.abi.optimizers import AdamStep
from nearflash.device import open_device
from nearflash.device.replay import VARIABLE, RecordingDevice, ReplayDevice, seal_line

N = 1000
SLOT = 4096


def update(lr, a) -> UpdateCommand:
    """A command over eight slots from address `a`."""
    inputs = {name: a + i * SLOT for i, name in enumerate(("g", "p", "m", "v"))}
    outputs = {name: a + i * SLOT for i, name in enumerate(("p", "m", "v", "copy"), 4)}
    return UpdateCommand(AdamStep(lr, 1), N, inputs, outputs, CopyFormat.BF16)


def host_line(device, lr=1e-3, scale=1.0):
    """What a training script would do; returns every byte and counter that came back."""
    with device:
        buffer = device.allocate(8 * SLOT)
        a = buffer.address
        values = np.random.default_rng(4).standard_normal(8 * SLOT // 4, dtype=np.float32) * np.float32(scale)
        buffer.host[:] = np.abs(values).view(np.uint8)
        buffer.sync_to_device()
        command = update(lr, a)
        with pytest.raises(AddressError) as refused:
            device.submit(update(lr, 0))
        counters = device.run(command).counters
        buffer.sync_from_device(4 * SLOT)
        result = buffer.host.tobytes()
        device.reset()
        device.free(buffer)
    return result, counters, str(refused.value), (device.links.to_device, device.links.from_device)


@pytest.fixture
def transcript(tmp_path):
    path = tmp_path / "run.jsonl"
    host_line(RecordingDevice(open_device("model:update-tiny"), path))
    return path


def test_the_same_host_line_runs_without_the_device(tmp_path, monkeypatch):
    path = tmp_path / "run.jsonl"
    plain = host_line(open_device("model:update-tiny"))
    recorded = host_line(RecordingDevice(open_device("model:update-tiny"), path))
    monkeypatch.setenv(VARIABLE, str(path))
    replayed = host_line(open_device("replay:update-tiny"))
    assert plain == recorded == replayed


def test_transcript_is_private_text_with_its_origin(transcript):
    assert stat.S_IMODE(transcript.stat().st_mode) == 0o600
    header = json.loads(transcript.read_text(encoding="ascii").splitlines()[0])
    assert header["magic"] == "nearflash-transcript" and header["version"] == 3
    assert "model:update-tiny" in header["generator"] and len(header["digest"]) == 16


def test_an_open_file_becomes_private(tmp_path):
    path = tmp_path / "run.jsonl"
    path.touch(mode=0o644)
    RecordingDevice(open_device("model:update-tiny"), path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_first_departure_is_named(transcript):
    with pytest.raises(
        ReplayError, match=r'line 4 of .*run.jsonl records {"op": "submit", "post_scale": \d+}, the run asks {'
    ):
        host_line(ReplayDevice(transcript, "update-tiny"), lr=2e-3)
    with pytest.raises(ReplayError, match=r'line 3 of .* records {"op": "to_device", "sha256": .*}, the run asks {'):
        host_line(ReplayDevice(transcript, "update-tiny"), scale=2.0)


def test_clean_up_after_a_departure_names_the_same_line(transcript):
    device = ReplayDevice(transcript, "update-tiny")
    buffer = device.allocate(8 * SLOT)
    with pytest.raises(ReplayError, match="line 3 "):
        device.reset()
    with pytest.raises(ReplayError, match=r'line 3 .* the run asks {"op": "reset"}'):
        device.free(buffer)
    device.close()


def test_an_error_of_the_run_is_not_hidden(transcript):
    with pytest.raises(ZeroDivisionError), ReplayDevice(transcript, "update-tiny"):
        raise ZeroDivisionError


def test_asking_more_or_less_is_a_departure(transcript):
    device = ReplayDevice(transcript, "update-tiny")
    with pytest.raises(ReplayError, match=r"line 2 of .* records 'allocate', but the run has ended"):
        device.close()
    lines = transcript.read_text().splitlines(keepends=True)
    transcript.write_text("".join(lines[:-1]))
    with pytest.raises(ReplayError, match=rf"line {len(lines)} of .* must exist: the run asks for more"):
        host_line(ReplayDevice(transcript, "update-tiny"))


def test_errors_of_the_device_are_raised_again(tmp_path):
    path = tmp_path / "run.jsonl"
    with RecordingDevice(open_device("model:update-tiny"), path) as device, pytest.raises(CommandError) as recorded:
        device.wait(7)
    with ReplayDevice(path, "update-tiny") as device, pytest.raises(CommandError) as replayed:
        device.wait(7)
    assert str(recorded.value) == str(replayed.value)


def test_errors_with_more_than_a_text(tmp_path):
    """A replayed StreamError was a TypeError, even undamaged."""
    path = tmp_path / "run.jsonl"

    def fail(ticket, timeout_s):
        raise StreamError("order of places", 5)

    recorder = RecordingDevice(open_device("model:update-tiny"), path)
    recorder._device.wait = fail
    with recorder as device, pytest.raises(StreamError):
        device.wait(1)
    with ReplayDevice(path, "update-tiny") as device, pytest.raises(StreamError, match="order of places") as replayed:
        device.wait(1)
    assert replayed.value.fault == 5


def test_no_pipe_and_no_folder(tmp_path):
    """To read a pipe had waited for ever."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ReplayError, match="it is no regular file"):
        ReplayDevice(tmp_path / "pipe", "update-tiny")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "none" / "x"):
        device = open_device("model:update-tiny")
        with device, pytest.raises(CommandError, match="record"):
            RecordingDevice(device, path)


def test_a_recording_replaces_only_a_transcript(transcript, tmp_path):
    """`--record` had emptied any file, and what a link named."""
    other, link = tmp_path / "model.safetensors", tmp_path / "link"
    other.write_bytes(b"weights")
    link.symlink_to(other)
    for path in (other, link):
        with open_device("model:update-tiny") as device, pytest.raises(CommandError, match="must be a new file"):
            RecordingDevice(device, path)
    assert other.read_bytes() == b"weights" and link.is_symlink()
    host_line(RecordingDevice(open_device("model:update-tiny"), transcript))
    host_line(ReplayDevice(transcript, "update-tiny"))
    assert not list(tmp_path.glob(".nearflash-*"))


def test_a_line_in_the_place_of_another_is_refused(tmp_path, transcript):
    """Each line had a checksum of its own alone: those of another recording held, and lines out of order."""
    lines = transcript.read_text().splitlines()
    host_line(RecordingDevice(open_device("model:update-tiny"), tmp_path / "other"))
    others = (tmp_path / "other").read_text().splitlines()
    assert len(lines) == len(others)
    for number in range(1, len(lines)):
        transcript.write_text("\n".join([*lines[:number], others[number], *lines[number + 1 :]]))
        with pytest.raises(ReplayError, match=rf"line {number + 1} of .* is damaged: its checksum is another"):
            host_line(ReplayDevice(transcript, "update-tiny"))


def test_foreign_and_damaged_files_are_refused(tmp_path, transcript):
    path = tmp_path / "other"
    for text in ("", "{}", "[]", '{"magic": "nearflash-transcript", "version": 1}', "\x00"):
        path.write_text(text)
        with pytest.raises(ReplayError, match=r"line 1 of|must begin as a nearflash-transcript of version 3"):
            ReplayDevice(path, "update-tiny")
    with pytest.raises(ReplayError, match="must name a readable transcript"):
        ReplayDevice(tmp_path, "update-tiny")
    lines = transcript.read_text().splitlines()
    cut = [line.replace('"bytes": "', '"bytes": "AAAA') for line in lines]
    transcript.write_text("\n".join(cut))
    with pytest.raises(ReplayError, match=r"line \d+ of .* is damaged: its checksum is another"):
        host_line(ReplayDevice(transcript, "update-tiny"))
    bodies = [{name: value for name, value in json.loads(line).items() if name != "crc32"} for line in cut]
    texts = [""]
    for body in bodies:
        texts.append(seal_line(body, texts[-1]))
    transcript.write_text("\n".join(texts[1:]))
    with pytest.raises(ReplayError, match="recorded bytes must be base64 of zlib, 16384 long"):
        host_line(ReplayDevice(transcript, "update-tiny"))
    transcript.write_text("\n".join([lines[0], lines[1][:20], *lines[2:]]))
    with pytest.raises(ReplayError, match=r"line 2 of .* must be JSON"):
        host_line(ReplayDevice(transcript, "update-tiny"))


def test_another_build_is_refused(transcript):
    with pytest.raises(DigestError, match=r"must be update-smartssd, not update-tiny: .*record it again"):
        ReplayDevice(transcript, "update-smartssd")


def test_without_a_transcript_the_message_says_how(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(UnknownDeviceError, match="'replay:update-tiny' plays a transcript: set NEARFLASH_REPLAY"):
        open_device("replay:update-tiny")
    with pytest.raises(UnknownDeviceError, match="must wrap an open device"):
        RecordingDevice.open("update-tiny")
