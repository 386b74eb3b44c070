"""Bytes of a tensor as they come from the file, a part at a time, and what is expanded from them."""

import os
from pathlib import Path

import numpy as np
import pytest

from nearflash.abi.errors import WeightsError
from nearflash.device.backends.host.matrix import CallingThread
from nearflash.storage.io.direct import aligned_buffer
from nearflash.weights import compress_tensor, expand, read_file, write_file
from nearflash.weights.compress import dense_tensor

RNG = np.random.default_rng(7)
LARGE_BYTES, CHUNK_BYTES = 5 << 20, 2 << 20
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


def zeros(size_bytes):
    memory = aligned_buffer(size_bytes)
    memory[:] = 0
    return memory


@pytest.mark.parametrize("name", ["small", "large", "none", "last"])
def test_reading_gives_the_files_bytes(file, name):
    tensor = file[name]
    assert name == "none" or tensor.offset % 4096
    assert tensor.read().tobytes() == bytes_of(tensor)


def test_a_part_is_read_and_not_the_end(file):
    expected = np.frombuffer(bytes_of(file["large"]), np.uint8)
    with file["large"].reading(zeros) as (data, fill):
        fill(1)
        assert (data[: CHUNK_BYTES - 4096] == expected[: CHUNK_BYTES - 4096]).all() and not data[CHUNK_BYTES:].any()
        fill(CHUNK_BYTES + 1000)
        assert (data[: CHUNK_BYTES + 1000] == expected[: CHUNK_BYTES + 1000]).all() and not data[-4096:].any()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["small", "large", "last"])
def test_any_increasing_parts_give_all_bytes(file, name, seed):
    random, expected = np.random.default_rng(seed), np.frombuffer(bytes_of(file[name]), np.uint8)
    with file[name].reading() as (data, fill):
        for count in [*np.sort(random.integers(0, len(data), 6)), len(data)]:
            fill(int(count))
            assert (data[:count] == expected[:count]).all()


def test_nothing_is_read_twice(file, monkeypatch):
    reads, preadv = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, to, at: reads.append((at, len(to[0]))) or preadv(fd, to, at))
    with file["large"].reading() as (data, fill):
        for count in (5000, 100, 5000, len(data), 0, len(data)):
            fill(count)
    ends = [at + length for at, length in reads]
    assert [at for at, _ in reads] == [file["large"].offset // 4096 * 4096, *ends[:-1]]
    assert len(reads) == 2 and all(at % 4096 == 0 for at in ends)


def test_more_than_there_is_reads_all(file):
    """It read nothing for ever."""
    with file["small"].reading() as (data, fill):
        fill(10 * len(data) + (1 << 20))
        assert data.tobytes() == bytes_of(file["small"])


@pytest.mark.parametrize("kept", [0, 1, 4096 - 64, 4096, 3 << 20])
def test_a_file_cut_between_two_parts(tmp_path, kept):
    data = RNG.integers(0, 256, LARGE_BYTES).astype(np.uint8)
    tensor = written(tmp_path / "file", dense_tensor("large", "U8", (LARGE_BYTES,), data))["large"]
    with tensor.reading() as (found, fill):
        fill(1000)
        os.truncate(tensor.path, tensor.offset + kept)
        with pytest.raises(WeightsError, match=rf"'large', at byte {tensor.offset}: the file ends \d+ bytes too early"):
            fill(len(found))


def test_the_files_descriptor_is_closed_after_an_error(file):
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(ZeroDivisionError), file["large"].reading():
        raise ZeroDivisionError
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
        tensor.path.write_bytes(data)
        with pytest.raises(WeightsError, match=f"tensor 'x', at byte {tensor.offset}: .*group 2"):
            expand(tensor, out=out, executor=executor)
        data[tensor.offset + tensor.stored_bytes - back] ^= 1
        tensor.path.write_bytes(data)
    assert expand(tensor).shape == SHAPE


@pytest.mark.parametrize("bits", [4, 8])
def test_damaged_codes_are_raised_where_they_have_a_checksum(tmp_path, bits):
    tensor = written(tmp_path / "file", compress_tensor("x", pruned(np.float16), "groups", bits))["x"]
    assert tensor.checksum is not None
    data = bytearray(tensor.path.read_bytes())
    data[tensor.offset + tensor.stored_bytes - 1] ^= 1
    tensor.path.write_bytes(data)
    with pytest.raises(WeightsError, match=f"tensor 'x', at byte {tensor.offset}: it is damaged"):
        expand(tensor)
