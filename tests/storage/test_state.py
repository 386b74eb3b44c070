"""The state file: commits, crashes at every write, damage, foreign files."""

import errno
import os

import numpy as np
import pytest

from nearflash.abi.errors import AlignmentError, StateError, StorageFullError
from nearflash.storage.direct import BLOCK_BYTES, PositionalEngine, aligned_buffer
from nearflash.storage.layout import ARRAYS
from nearflash.storage.manifest import Manifest
from nearflash.storage.sealed import seal
from nearflash.storage.state import StateFile

SHAPES = {"embed": (40, 30), "norm": (30,), "head": (900,)}
MANIFEST = Manifest.pack([(name, shape, "float32") for name, shape in SHAPES.items()], 1024)
INITIAL = np.random.default_rng(5).standard_normal(MANIFEST.params, dtype=np.float32)


def create(path, **kwargs):
    def initial(extent, out):
        out[:] = INITIAL[extent.start : extent.stop]

    return StateFile.create(path, MANIFEST, profile="ieee", initial=initial, **kwargs)


def values(array, step):
    """What step `step` stores in an array."""
    if step == 0:
        return INITIAL if array == "p" else np.zeros_like(INITIAL)
    return np.random.default_rng([step, ARRAYS.index(array)]).standard_normal(MANIFEST.params, dtype=np.float32)


def advance(state):
    step = state.step + 1
    for extent in MANIFEST.extents:
        for array in ARRAYS:
            memory = aligned_buffer(extent.size_bytes)
            memory.view(np.float32)[:] = values(array, step)[extent.start : extent.stop]
            state.write(array, extent, memory)
    state.commit((step, step, 0))


def assert_exact(state):
    """Every stored word is that of the state's own step."""
    for extent in MANIFEST.extents:
        for array in ARRAYS:
            memory = aligned_buffer(extent.size_bytes)
            state.read(array, extent, memory)
            assert np.array_equal(memory.view(np.float32), values(array, state.step)[extent.start : extent.stop])
    assert state.tensor_steps == (state.step, state.step, 0)


@pytest.fixture
def path(tmp_path):
    """A state file at step 3."""
    with create(tmp_path / "state") as state:
        for _ in range(3):
            advance(state)
    return tmp_path / "state"


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def test_commits_survive_reopening(tmp_path):
    with create(tmp_path / "state") as state:
        assert (state.step, state.tensor_steps) == (0, (0, 0, 0))
        assert_exact(state)
    for step in (1, 2, 3):
        with StateFile.open(tmp_path / "state") as state:
            advance(state)
            assert state.step == step
            assert_exact(state)
        with StateFile.open(tmp_path / "state") as state:
            assert (state.step, state.manifest, state.profile) == (step, MANIFEST, "ieee")
            assert_exact(state)
            assert state.verify() == []
    assert [p.name for p in tmp_path.iterdir()] == ["state"]
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o600


def test_uncommitted_writes_change_nothing(path):
    with StateFile.open(path) as state:
        state.write("p", MANIFEST.extents[0], aligned_buffer(MANIFEST.extents[0].size_bytes))
        assert_exact(state)
        with pytest.raises(StateError, match=r"\d+ are not"):
            state.commit((4, 4, 0))
        state.discard()
        advance(state)
        assert_exact(state)


def test_existing_path_is_refused(path):
    before = path.read_bytes()
    with pytest.raises(StateError, match="must not exist yet"):
        create(path)
    assert path.read_bytes() == before


class Recorder(PositionalEngine):
    """Keeps every write, and marks where the flushes were."""

    def __init__(self):
        self.log = []

    def write(self, fd, memory, offset):
        self.log.append((offset, bytes(memory)))
        return super().write(fd, memory, offset)

    def flush(self, fd):
        self.log.append(None)
        super().flush(fd)


def test_power_loss_at_every_write(path, tmp_path):
    """Cut after every write; of those since the last flush any subset of sectors may have reached the drive."""
    rng = np.random.default_rng(11)
    durable, recorder = bytearray(path.read_bytes()), Recorder()
    with StateFile.open(path, engine=recorder) as state:
        advance(state)
    steps = set()
    for cut in range(len(recorder.log) + 1):
        pending = []
        image = bytearray(durable)
        for entry in recorder.log[:cut]:
            if entry is None:
                for offset, data in pending:
                    image[offset : offset + len(data)] = data
                pending = []
            else:
                pending.append(entry)
        for survivors in (0.0, 0.5, 0.9, 1.0):
            crashed = bytearray(image)
            for offset, data in pending:
                for sector in range(0, len(data), 512):
                    if rng.random() < survivors:
                        crashed[offset + sector : offset + sector + 512] = data[sector : sector + 512]
            (tmp_path / "crashed").write_bytes(crashed)
            with StateFile.open(tmp_path / "crashed") as state:
                assert_exact(state)
                steps.add(state.step)
    assert steps == {3, 4}


@pytest.mark.parametrize("number, expected", [(errno.ENOSPC, StorageFullError), (errno.EIO, StateError)])
def test_failing_writes_leave_the_last_step(path, number, expected):
    class Failing(PositionalEngine):
        left = 1_000

        def write(self, fd, memory, offset):
            self.left -= 1
            if self.left < 0:
                raise OSError(number, os.strerror(number))
            return super().write(fd, memory, offset)

    for failing_write in range(7):
        engine = Failing()
        with StateFile.open(path, engine=engine) as state:
            engine.left = failing_write
            with pytest.raises(expected, match=r"of .*state at offset \d+"):
                advance(state)
            assert_exact(state)
            engine.left = 1_000
            state.discard()
            advance(state)
            assert_exact(state)


def test_failed_flush_ends_the_use_of_the_file(path):
    class Failing(PositionalEngine):
        def flush(self, fd):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with StateFile.open(path, engine=Failing()) as state:
        with pytest.raises(StateError, match="flushing"):
            advance(state)
        with pytest.raises(StateError, match=r"a flush failed.*open again"):
            advance(state)
    with StateFile.open(path) as state:
        assert_exact(state)


def test_every_extent_is_checked(path):
    with StateFile.open(path) as state:
        places = [(a, e, state._layout.array_offset(3, a, e) + 77) for a in ARRAYS for e in MANIFEST.extents]
    for array, extent, offset in places:
        flip(path, offset)
        before = path.read_bytes()
        with StateFile.open(path) as state:
            with pytest.raises(StateError, match=f"array {array} of step 3 is damaged in tensors .*file offset"):
                state.read(array, extent, aligned_buffer(extent.size_bytes))
            (message,) = state.verify()
            assert MANIFEST.names_in(extent) in message and str(offset - 77) in message
        assert path.read_bytes() == before
        flip(path, offset)


def test_damaged_last_superblock_opens_the_step_before(path):
    flip(path, BLOCK_BYTES + 60)
    with StateFile.open(path) as state:
        assert state.step == 2
        assert_exact(state)


def test_damaged_superblock_and_overwritten_slot_is_refused(path):
    with StateFile.open(path) as state:
        memory = aligned_buffer(MANIFEST.extents[0].size_bytes)
        state.write("m", MANIFEST.extents[0], memory)
    flip(path, BLOCK_BYTES + 60)
    before = path.read_bytes()
    with pytest.raises(StateError, match=r"one superblock is damaged.*array m of step 2"):
        StateFile.open(path)
    assert path.read_bytes() == before


def overwrite(offset, data):
    def change(content):
        content[offset : offset + len(data)] = data

    return change


def foreign(content):
    content[:] = b"\x89PNG" * (len(content) // 4)


def newer(key, value):
    body = {"version": 2, "abi": 1, "step": 4, "profile": "ieee"} | {key: value}
    return overwrite(0, seal("superblock", body).tobytes())


def shorten(to_bytes):
    def change(content):
        del content[to_bytes:]

    return change


@pytest.mark.parametrize(
    "change, message",
    [
        (foreign, "must begin with a nearflash superblock"),
        (overwrite(0, bytes(2 * BLOCK_BYTES)), "must begin with a nearflash superblock"),
        (overwrite(0, b"nearflash.superblock junk" + bytes(2 * BLOCK_BYTES - 25)), "both superblocks are damaged"),
        (newer("version", 3), "must have version 2, not 3"),
        (newer("abi", 9), "must have abi 1, not 9"),
        (shorten(-1), "whole number of 4096-byte blocks"),
        (shorten(-BLOCK_BYTES), "must have 225280 bytes, not 221184"),
        (shorten(2 * BLOCK_BYTES), "at least 3, not 8192"),
        (shorten(0), "at least 3, not 0"),
        (lambda content: content.extend(bytes(BLOCK_BYTES)), "must have 225280 bytes, not 229376"),
        (overwrite(2 * BLOCK_BYTES + 100, b"@"), "the manifest at offset 8192 is damaged"),
        (overwrite(20 * BLOCK_BYTES + 100, b"@"), "the checksum table at offset 81920 is damaged"),
    ],
)
def test_bad_files_are_refused_untouched(path, change, message):
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)
    with pytest.raises(StateError, match=message):
        StateFile.open(path)
    assert path.read_bytes() == content


def test_missing_file_is_named(tmp_path):
    with pytest.raises(StateError, match="not a missing one"):
        StateFile.open(tmp_path / "none")


def test_locked_file(path):
    with StateFile.open(path), pytest.raises(StateError, match="in use by another process"):
        StateFile.open(path)


def test_wrong_length_is_refused(path):
    with StateFile.open(path) as state, pytest.raises(AlignmentError, match="must have the extent's 4096 bytes"):
        state.read("p", MANIFEST.extents[0], aligned_buffer(2 * BLOCK_BYTES))


def test_failed_creation_leaves_nothing(tmp_path):
    class Full(PositionalEngine):
        def write(self, fd, memory, offset):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(StorageFullError):
        create(tmp_path / "state", engine=Full())
    assert list(tmp_path.iterdir()) == []


def test_left_over_of_a_killed_creation_is_replaced(tmp_path):
    (tmp_path / "state.partial").write_bytes(b"x" * 500_000)
    with create(tmp_path / "state") as state:
        assert_exact(state)
    assert [p.name for p in tmp_path.iterdir()] == ["state"]
