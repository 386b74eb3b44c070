"""Files that other programs read: checked against the format's own library."""

import json
import os
import stat

import numpy as np
import pytest

safetensors = pytest.importorskip("safetensors.numpy")

from nearflash.abi.errors import StateError, StorageFullError  # noqa: E402
from nearflash.storage.state import safetensors as files  # noqa: E402
from nearflash.storage.state.safetensors import (  # noqa: E402
    StoredTensor,
    TensorFile,
    encode_header,
    new_file,
    tensors_header,
    write_tensors,
)

ARRAYS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(5, dtype=np.uint8),
    "none": np.zeros(0, "i8"),
}
NAMES = {"float32": "F32", "uint8": "U8", "int64": "I64"}
TENSORS = [StoredTensor(name, NAMES[array.dtype.name], array.shape) for name, array in ARRAYS.items()]


def pieces():
    whole = np.concatenate([array.reshape(-1).view(np.uint8) for array in ARRAYS.values()])
    yield from np.array_split(whole, 4)  # which end in the midst of a tensor


@pytest.fixture
def path(tmp_path):
    write_tensors(tmp_path / "file", TENSORS, {"made_by": "a test"}, pieces())
    return tmp_path / "file"


def test_the_formats_own_reader_finds_every_tensor(path):
    found = safetensors.load_file(path)
    assert found.keys() == ARRAYS.keys()
    assert all(found[name].dtype == ARRAYS[name].dtype and np.array_equal(found[name], ARRAYS[name]) for name in found)


def test_tensors_and_checksums_are_read_back(path):
    file = TensorFile(path)
    assert list(file.tensors.values()) == TENSORS and file.metadata["made_by"] == "a test"
    content = path.read_bytes()
    for name, array in ARRAYS.items():
        assert file.read(name, 0, file.size_of(name)).tobytes() == array.tobytes()
        assert content[file.offset_of(name) :].startswith(array.tobytes())
        file.check(name, file.checksums[name])
        with pytest.raises(StateError, match=f"tensor '{name}' is damaged"):
            file.check(name, file.checksums[name] ^ 1)


def test_a_file_of_another_writer_has_no_checksums(tmp_path):
    safetensors.save_file(ARRAYS, tmp_path / "file")
    file = TensorFile(tmp_path / "file")
    assert file.checksums is None and file.read("b", 0, 5).tolist() == [0, 1, 2, 3, 4]
    file.check("b", 1)  # nothing to compare with


def test_a_file_that_is_cut_after_it_was_opened_is_an_error(path):
    """It was mapped into memory: the process ended with SIGBUS."""
    file = TensorFile(path)
    os.truncate(path, 100)
    for name in ARRAYS:
        with pytest.raises(StateError, match=f"reading tensor '{name}' failed .it was changed while it was in use"):
            file.read(name, 0, file.size_of(name))


@pytest.mark.parametrize("offsets", [[[0, 4], [0, 4]], [[0, 4], [5, 9]], [[4, 8], [0, 5]], [[0, 4.0], [4, 8]]])
def test_tensors_that_share_bytes_or_leave_some_out(tmp_path, offsets):
    each = {f"x{n}": {"dtype": "F32", "shape": [1], "data_offsets": own} for n, own in enumerate(offsets)}
    header = encode_header(each)
    (tmp_path / "file").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(StateError, match="must begin behind the tensor before it and have the bytes of its shape"):
        TensorFile(tmp_path / "file")


def test_a_name_that_is_there_twice(tmp_path):
    each = b'"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    header = b"{" + each + b"," + each + b"}"
    (tmp_path / "file").write_bytes(len(header).to_bytes(8, "little") + header + b"a")
    with pytest.raises(StateError, match="a name must not be there twice"):
        TensorFile(tmp_path / "file")


def test_a_header_of_ten_to_the_twelve_bytes_and_a_pipe(tmp_path):
    (tmp_path / "file").write_bytes((10**12).to_bytes(8, "little") + b"{}")
    os.mkfifo(tmp_path / "pipe")
    for name, why in (("file", "the header is longer than the file"), ("pipe", "no regular file")):
        with pytest.raises(StateError, match=why):
            TensorFile(tmp_path / name)


def test_a_format_that_is_not_known_here_is_listed(tmp_path):
    header = encode_header({"x": {"dtype": "F8_E4M3", "shape": [3], "data_offsets": [0, 3]}})
    (tmp_path / "file").write_bytes(len(header).to_bytes(8, "little") + header + b"abc")
    file = TensorFile(tmp_path / "file")
    assert file.tensors["x"].dtype == "F8_E4M3" and file.read("x", 0, 3).tobytes() == b"abc"


@pytest.mark.parametrize("size", [0, 1, 500, 501, 4096])
def test_a_header_is_as_long_as_is_asked(size):
    header = tensors_header(TENSORS, {}, [1, 2, 3], size)
    assert len(header) >= size and len(header) % 8 == 0 and json.loads(header)["b"]["data_offsets"] == [24, 29]
    assert len(header) == max(-(-size // 8) * 8, len(tensors_header(TENSORS, {}, [1, 2, 3])))


def test_every_changed_byte_of_a_header_is_noticed(path):
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    for at in range(8, 8 + length):
        changed = bytearray(content)
        changed[at] ^= 1
        path.write_bytes(changed)
        with pytest.raises(StateError, match="must be a safetensors file"):
            TensorFile(path)


def test_too_few_or_too_many_bytes_leave_no_file(tmp_path):
    for data in ([np.zeros(28, np.uint8)], [np.zeros(29, np.uint8), np.zeros(1, np.uint8)]):
        with pytest.raises(StateError, match=r"must get 29 bytes of tensors, not (28|30)"):
            write_tensors(tmp_path / "file", TENSORS, {}, data)
    assert not list(tmp_path.iterdir())


def test_names_must_differ(tmp_path):
    with pytest.raises(StateError, match="the names of its 4 tensors must differ"):
        write_tensors(tmp_path / "file", [*TENSORS, TENSORS[0]], {}, [])


def test_a_new_file_is_its_users_alone_and_appears_complete(tmp_path):
    path = tmp_path / "file"
    with new_file(path) as file:
        file.write(b"abc")
        file.flush()
        assert not path.exists() and len(list(tmp_path.iterdir())) == 1
    assert path.read_bytes() == b"abc" and stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(StateError, match="must not exist yet"), new_file(path):
        raise AssertionError("unreachable")
    assert path.read_bytes() == b"abc"


def test_two_writers_of_one_name(tmp_path):
    path = tmp_path / "file"
    with pytest.raises(StateError, match="another one was written meanwhile"), new_file(path) as slow:
        with new_file(path) as fast:
            fast.write(b"fast")
        slow.write(b"slow")
    assert path.read_bytes() == b"fast" and [each.name for each in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_nothing_is_left_after_an_error(tmp_path, error):
    expected = StorageFullError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected), new_file(tmp_path / "file") as file:
        file.write(b"abc")
        raise error
    assert not list(tmp_path.iterdir())


def test_a_file_system_without_links(tmp_path, monkeypatch):
    def no_links(*_):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(files.os, "link", no_links)
    with new_file(tmp_path / "file") as file:
        file.write(b"abc")
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
