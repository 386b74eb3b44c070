"""A checkpoint in chunks over several files: its bytes, which file they come from, and what is wrong with a file."""

import os

import numpy as np
import pytest

from nearflash.abi.errors import CommandError, StateError
from nearflash.storage.io.direct import aligned_buffer
from nearflash.storage.io.unchanged import UnchangedFile
from nearflash.weights.striped import Stripes

CHUNK = 8192
RNG = np.random.default_rng(2)


@pytest.fixture
def files(tmp_path):
    made = []
    for name, size in (("model-1.safetensors", 41 * CHUNK + 100), ("model-2.safetensors", 7 * CHUNK)):
        (tmp_path / name).write_bytes(RNG.integers(0, 256, size, np.uint8).tobytes())
        made.append(UnchangedFile(tmp_path / name))
    return made


@pytest.fixture
def paths(tmp_path):
    return [tmp_path / name for name in ("a", "b", "c")]


def opened(files, paths, ratio=None, **options):
    return Stripes(files, paths, ratio, chunk_bytes=CHUNK, **options)


@pytest.mark.parametrize("ratio", [None, (1, 1, 1), (2, 1, 1), (1, 5, 2)])
def test_any_range_is_that_of_the_file(files, paths, ratio):
    stripes, said = None, []
    for _ in range(2):  # made, then found
        stripes = opened(files, paths, ratio, announce=said.append)
        for file in files:
            expected, striped = file.path.read_bytes(), stripes.file(file)
            assert stripes.file(file) is striped
            for start, size in ((0, 4096), (CHUNK - 4096, 8192), (3 * CHUNK, 4 * CHUNK), (4096, 6 * CHUNK)):
                memory = aligned_buffer(size)
                parts = [memory[:4096].data, memory[4096:].data]
                assert striped.scatter(parts, start, direct=True) == size
                assert memory.tobytes() == expected[start : start + size]
            memory = aligned_buffer(-(-len(expected) // 4096) * 4096)
            assert striped.scatter([memory.data], 0, direct=True) == len(expected)
            assert memory[: len(expected)].tobytes() == expected
        stripes.close()
    assert len(said) == 1 and "are copied once to" in said[0]


def test_bytes_come_as_the_ratio_says(files, paths):
    stripes = opened(files, paths[:2], (3, 1))
    memory = aligned_buffer(40 * CHUNK)
    stripes.file(files[0]).scatter([memory.data], 0, direct=True)
    assert stripes.read_bytes == [30 * CHUNK, 10 * CHUNK]
    stripes.close()


def test_parts_of_another_checkpoint_or_copy_are_named_and_stay(files, paths, tmp_path):
    opened(files, paths).close()
    with pytest.raises(StateError, match="a must be part 0 of this checkpoint, as it is now, of ratio 2,1,1"):
        opened(files, paths, (2, 1, 1))
    paths[1].rename(tmp_path / "away")
    with pytest.raises(StateError, match=r"b must be there as .*a is: remove the others"):
        opened(files, paths)
    others = [tmp_path / name for name in ("x", "y", "z")]
    opened(files, others).close()
    others[1].rename(paths[1])
    with pytest.raises(StateError, match="must be of one copy: remove them"):
        opened(files, paths)
    paths[1].write_bytes(b"mine")
    with pytest.raises(StateError, match="b must be a part of striped weights, and is left as it is"):
        opened(files, paths)
    assert paths[1].read_bytes() == b"mine"
    with pytest.raises(CommandError, match="weights_path must be given once for each drive"):
        opened(files, [paths[0], paths[0]])
    with pytest.raises(StateError, match="weights_ratio must be of 3 files"):
        opened(files, paths, (1, 1))


def test_other_weights_of_the_same_size_and_time_are_not_taken_for_these(files, paths, tmp_path):
    """Programs that unpack models give all files one time: name, size and time were those of another model, too."""
    opened(files, paths).close()
    path = files[0].path
    other = bytes(files[0].size_bytes)
    for replace in (lambda: path.write_bytes(other), lambda: (path.unlink(), path.write_bytes(other))):
        replace()
        os.utime(path, ns=(files[0].mtime_ns, files[0].mtime_ns))
        with pytest.raises(StateError, match="a must be part 0 of this checkpoint, as it is now"):
            opened([UnchangedFile(path), files[1]], paths)


def test_a_part_that_was_written_to_is_not_read(files, paths):
    """A damaged part gave other tokens: dense tensors of other programs have no checksum."""
    opened(files, paths).close()
    with paths[1].open("r+b") as part:
        part.seek(200_000)
        part.write(b"x")
    with pytest.raises(StateError, match=r"b must be as it was made, but was written to: remove all parts"):
        opened(files, paths)


def test_nothing_is_left_of_a_copy_that_fails(files, paths, monkeypatch):
    monkeypatch.setattr(UnchangedFile, "read", lambda self, offset, size: (_ for _ in ()).throw(OSError(5, "gone")))
    with pytest.raises(StateError, match=r"model-1.safetensors cannot be read \(gone\): check the drive"):
        opened(files, paths)
    assert not any(path.exists() for path in paths)


def test_a_drive_that_fails_is_named(files, paths):
    stripes = opened(files, paths)
    with paths[1].open("r+b") as part:
        part.truncate(CHUNK)
    with pytest.raises(OSError, match=r"changed while it was in use.*, on .*b"):
        stripes.file(files[0]).scatter([aligned_buffer(8 * CHUNK).data], 0, direct=True)
    stripes.close()
