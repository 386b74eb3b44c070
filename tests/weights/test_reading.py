"""Bytes of a tensor as they come from the file, and what is expanded from them."""

import os
from pathlib import Path

import numpy as np
import pytest

from nearflash.abi.errors import WeightsError
from nearflash.storage.io.direct import aligned_buffer
from nearflash.support.threads import CallingThread
from nearflash.verify.fixtures.files import rot
from nearflash.weights import compress_tensor, expand, read_file, write_file
from nearflash.weights.compress import dense_tensor

RNG = np.random.default_rng(7)
LARGE_BYTES = 5 << 20
SHAPE = (1200, 1024)
"""More than one group of a megabyte."""


def pruned(dtype):
    values = RNG.normal(0, 0.02, SHAPE).astype(np.float16)
    values[RNG.random(SHAPE) < 0.5] = 0
    return values.view(dtype)


def written(path, *packed):
    write_file(path, {each.name: (each.dtype, each.shape) for each in packed}, packed)
    return read_file(path)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """`small` lies in front, so that `large` begins where no block does; `last` ends with the file, in a block."""
    packed = [dense_tensor(name, "U8", (size,), RNG.integers(0, 256, size).astype(np.uint8))
              for name, size in (("small", 1000), ("large", LARGE_BYTES + 3), ("none", 0), ("last", 5001))]  # fmt: skip
    return written(tmp_path_factory.mktemp("reading") / "file", *packed)


def bytes_of(tensor):
    return tensor.path.read_bytes()[tensor.offset : tensor.offset + tensor.stored_bytes]


@pytest.mark.parametrize("name", ["small", "large", "none", "last"])
def test_reading_gives_the_files_bytes(file, name):
    tensor = file[name]
    assert name == "none" or tensor.offset % 4096
    assert tensor.read().tobytes() == bytes_of(tensor)


def test_a_read_in_parts_gives_all_bytes(file, monkeypatch):
    """As the system may give fewer bytes than were asked for."""
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, to, at: preadv(fd, [to[0][: 1 << 20]], at))
    for name in ("small", "large", "last"):
        assert file[name].read().tobytes() == bytes_of(file[name])


@pytest.mark.parametrize("kept", [0, 1, 4096 - 64, 4096, 3 << 20])
def test_a_file_that_was_cut(tmp_path, kept):
    data = RNG.integers(0, 256, LARGE_BYTES).astype(np.uint8)
    tensor = written(tmp_path / "file", dense_tensor("large", "U8", (LARGE_BYTES,), data))["large"]
    os.truncate(tensor.path, tensor.offset + kept)
    for read in (tensor.read, tensor.load):
        with pytest.raises(WeightsError, match=rf"'large', at byte {tensor.offset}: reading failed .it was changed"):
            read()


def test_what_is_loaded_is_not_checked_before_it_is_asked_for(tmp_path):
    data = RNG.integers(0, 256, 5000).astype(np.uint8)
    tensor = written(tmp_path / "file", dense_tensor("x", "U8", (5000,), data))["x"]
    tensor.check(tensor.load())
    damage = bytearray(tensor.path.read_bytes())
    damage[tensor.offset] ^= 1
    rot(tensor.path, damage)
    found = tensor.load()
    with pytest.raises(WeightsError, match=r"'x', .* it is damaged: its checksum is another"):
        tensor.check(found)


def test_the_files_descriptor_is_closed_after_an_error(file, monkeypatch):
    def fails(*_):
        raise OSError(5, "Input/output error")

    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(WeightsError, match=r"'large', .* reading failed \(Input/output error\)"):
        file["large"].read()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("more", [0, 4096, 3 << 20])
def test_memory_of_the_callers_is_used(file, more):
    taken = []

    def memory(size_bytes):
        taken.append(aligned_buffer(size_bytes + more))
        return taken[-1]

    for name in ("small", "large", "last"):
        found = file[name].read(memory)
        assert found.tobytes() == bytes_of(file[name])
        assert found.ctypes.data == taken.pop().ctypes.data + file[name].offset % 4096
        assert np.shares_memory(expand(file[name], memory=memory), taken.pop())
    assert not taken


@pytest.mark.parametrize("dtype", [np.float16, np.uint16])
@pytest.mark.parametrize(("format", "bits", "form"), [
    ("bitmap", 16, "bitmap"), ("coded-bitmap", 16, "bitmap"), ("bitmap", 8, "bitmap"), ("bitmap", 4, "bitmap"),
    ("groups", 8, "int8"), ("groups", 4, "int4"), ("dense", 16, "dense"),
])  # fmt: skip
def test_every_way_of_expanding_gives_the_same_bits(tmp_path, dtype, format, bits, form):
    values = pruned(dtype)
    data = dense_tensor("x", "F16" if dtype is np.float16 else "BF16", SHAPE, values.view(np.uint8).ravel())
    packed = data if form == "dense" else compress_tensor("x", values, format, bits)
    tensor = written(tmp_path / "file", packed)["x"]
    found = expand(tensor)
    assert tensor.form == form and (found.dtype, found.shape) == (dtype, SHAPE)
    assert bits < 16 or found.tobytes() == values.tobytes()
    for options in ({}, {"executor": CallingThread()}):
        out = np.full(SHAPE, 77).astype(dtype)
        assert expand(tensor, out=out, **options) is out
        assert out.tobytes() == expand(tensor, **options).tobytes() == found.tobytes()


@pytest.mark.parametrize("executor", [None, CallingThread()], ids=["threads", "caller"])
@pytest.mark.parametrize("format", ["bitmap", "coded-bitmap"])
def test_damage_in_the_last_group_is_raised(tmp_path, format, executor):
    tensor = written(tmp_path / "file", compress_tensor("x", pruned(np.float16), format))["x"]
    out = np.empty(SHAPE, np.float16)
    for back in (60, 64, 200):  # in the group's end, its checksum and its number, and in the rows before it
        data = bytearray(tensor.path.read_bytes())
        data[tensor.offset + tensor.stored_bytes - back] ^= 1
        rot(tensor.path, data)
        with pytest.raises(WeightsError, match=f"tensor 'x', at byte {tensor.offset}: .*group"):
            expand(tensor, out=out, executor=executor)
        data[tensor.offset + tensor.stored_bytes - back] ^= 1
        rot(tensor.path, data)
    assert expand(tensor).shape == SHAPE


@pytest.mark.parametrize("bits", [4, 8])
def test_damaged_codes_are_raised_where_they_have_a_checksum(tmp_path, bits):
    tensor = written(tmp_path / "file", compress_tensor("x", pruned(np.float16), "groups", bits))["x"]
    assert tensor.checksum is not None
    data = bytearray(tensor.path.read_bytes())
    data[tensor.offset + tensor.stored_bytes - 1] ^= 1
    rot(tensor.path, data)
    with pytest.raises(WeightsError, match=f"tensor 'x', at byte {tensor.offset}: it is damaged"):
        expand(tensor)
