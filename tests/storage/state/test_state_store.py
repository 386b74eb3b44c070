"""The state store: commits, failing I/O, damage, rollback, on one file and on two."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from nearflash.abi.errors import AlignmentError, FormatError, LostStepWarning, ShapeError, StateError, StorageFullError
from nearflash.storage import Manifest, StateArray, StateStore, aligned_buffer
from nearflash.storage.io.backend import BLOCK_BYTES, PositionalBackend
from nearflash.storage.state.layout import METADATA_BYTES


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def contents(paths):
    return [path.read_bytes() for path in paths]


def test_commits_survive_reopening(paths, tmp_path, small):
    with small.create(paths) as store:
        assert (store.steps, store.tensor_steps, store.metadata) == (0, (0, 0, 0), {})
        assert store.paths == tuple(paths)
        small.assert_exact(store)
    for step in (1, 2, 3):
        with StateStore.open(paths) as store:
            small.advance(store)
            assert store.steps == step
            small.assert_exact(store)
        with StateStore.open(paths) as store:
            assert (store.steps, store.manifest, store.profile) == (step, small.manifest, "ieee")
            small.assert_exact(store)
            assert store.verify() == []
    assert sorted(tmp_path.iterdir()) == paths
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in paths)


@pytest.mark.parametrize("params", [1000, 5000, 10_000])
def test_arrays_of_other_formats(paths, small, params):
    arrays = (StateArray("p"), StateArray("m", 1, 1), StateArray("m_scale", 1, 32), StateArray("v", 2))
    manifest = Manifest.pack([("w", (params,), "bfloat16")], 4096, arrays)
    with small.create(paths, manifest) as store:
        small.advance(store, 2)
    with StateStore.open(paths) as store:
        small.assert_exact(store)
        for array, dtype in (("p", np.float32), ("m", np.uint8), ("m_scale", np.uint8), ("v", np.uint16)):
            whole = store.read_array(array)
            assert whole.dtype == dtype
            assert whole.tobytes() == small.values(manifest, array, 2).tobytes()


def test_many_threads_at_once(paths, small):
    with small.create(paths) as store, ThreadPoolExecutor(8) as threads:
        jobs = [(a.name, e, small.memory_of(store.manifest, a.name, e, 1)) for a in small.arrays
                for e in store.manifest.extents]  # fmt: skip
        for job in np.random.default_rng(1).permutation(len(jobs)):
            threads.submit(store.write, *jobs[job])
        threads.shutdown()
        store.commit((1, 0, 0), {"cursor": 1})
        small.assert_exact(store)


def test_uncommitted_writes_change_nothing(stored, small):
    with StateStore.open(stored) as store:
        extent = small.manifest.extents[0]
        store.write("p", extent, aligned_buffer(extent.size_bytes))
        small.assert_exact(store)
        with pytest.raises(StateError, match="8 are not"):
            store.commit((4, 4, 0))
        store.discard()
        small.advance(store)
        small.assert_exact(store)


def test_commits_that_make_no_sense(stored, small):
    with StateStore.open(stored) as store:
        small.write_step(store)
        with pytest.raises(ShapeError, match="tensor_steps must be of 3 tensors, not 2"):
            store.commit((1, 2))
        for wrong in ({"x": object()}, {"x": 10**5000}):
            with pytest.raises(FormatError, match=r"must be a plain value, not a object|must be values that JSON"):
                store.commit((1, 2, 3), wrong)
        with pytest.raises(FormatError, match="metadata must fit 65536 bytes of JSON"):
            store.commit((1, 2, 3), {"x": "y" * METADATA_BYTES})
        small.assert_exact(store)
        store.commit((4, 3, 3), {"x": "y" * (METADATA_BYTES - 100)})
        small.write_step(store)
        store.commit((5, 4, 4))
    with StateStore.open(stored) as store:
        assert store.steps == 5 and len(store.metadata["x"]) == METADATA_BYTES - 100


def test_existing_paths_are_refused(stored, small, tmp_path):
    before = contents(stored)
    with pytest.raises(StateError, match=f"{stored[-1]} must not exist yet"):
        small.create([tmp_path / "new", stored[-1]])
    with pytest.raises(StateError, match="be given once"):
        small.create([tmp_path / "new", tmp_path / "new"])
    assert contents(stored) == before and not (tmp_path / "new").exists()


def test_a_name_that_another_took_while_a_state_was_filled_stays_the_others(small, tmp_path):
    """It was replaced, and with it the other's state."""
    path = tmp_path / "state"
    with pytest.raises(StateError, match="another one was written meanwhile"):
        StateStore.create(path, small.manifest, profile="ieee", initial=lambda *_: path.write_bytes(b"another's"))
    assert path.read_bytes() == b"another's" and [each.name for each in tmp_path.iterdir()] == ["state"]


def test_an_unfinished_state_with_another_name_is_not_emptied(small, tmp_path):
    """Its other name is a file that somebody keeps."""
    kept = tmp_path / "kept"
    kept.write_bytes(b"kept")
    (tmp_path / "state.partial").hardlink_to(kept)
    with pytest.raises(StateError, match="with one name: choose another path"):
        small.create(tmp_path / "state")
    assert kept.read_bytes() == b"kept"


# Failing I/O


class Failing(PositionalBackend):
    """Fails at the write that `left` counts down to."""

    def __init__(self, number, left=1_000):
        self.number, self.left = number, left

    def write(self, fd, memory, offset):
        self.left -= 1
        if self.left < 0:
            raise OSError(self.number, os.strerror(self.number))
        return super().write(fd, memory, offset)


@pytest.mark.parametrize("number, expected", [(errno.ENOSPC, StorageFullError), (errno.EIO, StateError)])
def test_failing_writes_leave_the_last_step(stored, small, number, expected):
    for failing_write in range(7):
        backend = Failing(number)
        with StateStore.open(stored, backend=backend) as store:
            store._settle()
            backend.left = failing_write
            with pytest.raises(expected, match=r"of .*state-\d at offset \d+"):
                small.advance(store)
            small.assert_exact(store)
            backend.left = 1_000
            store.discard()
            small.advance(store)
            small.assert_exact(store)


class NoFlush(PositionalBackend):
    """Fails at the flush that `left` counts down to: before the first write, of the data, of the superblock."""

    left = 0

    def flush(self, fd):
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().flush(fd)


@pytest.mark.parametrize("flushes", [0, 1, 2])
def test_failed_flush_ends_the_use_of_the_store(stored, small, flushes):
    backend = NoFlush()
    backend.left = (flushes + 1) * len(stored) - 1
    with StateStore.open(stored, backend=backend) as store:
        with pytest.raises(StateError, match="flushing"):
            small.advance(store)
        small.assert_exact(store)
        for use in (lambda: small.advance(store), store.rollback):
            with pytest.raises(StateError, match=r"a flush failed.*open again"):
                use()
    with StateStore.open(stored) as store:
        small.assert_exact(store)
        small.advance(store)
        small.assert_exact(store)


def test_what_was_read_is_made_durable_before_it_is_built_upon(stored, small):
    """A superblock whose flush failed may be seen again without being durable; it is written and flushed again."""
    log = []

    class Recorder(PositionalBackend):
        def write(self, fd, memory, offset):
            log.append(offset)
            return super().write(fd, memory, offset)

        def flush(self, fd):
            log.append("flush")
            super().flush(fd)

    with StateStore.open(stored, backend=Recorder()) as store:
        small.assert_exact(store)
        assert log == []
        small.advance(store)
    assert log[: 2 * len(stored)].count(BLOCK_BYTES) == len(stored) == log[: 2 * len(stored)].count("flush")


def test_failed_creation_leaves_nothing(paths, tmp_path, small):
    for left in range(12):
        with pytest.raises(StorageFullError):
            small.create(paths, backend=Failing(errno.ENOSPC, left))
        assert list(tmp_path.iterdir()) == []


def test_left_over_of_a_killed_creation_is_replaced(paths, tmp_path, small):
    (tmp_path / "state-0.partial").write_bytes(b"x" * 500_000)
    with small.create(paths) as store:
        small.assert_exact(store)
    assert sorted(tmp_path.iterdir()) == paths


def test_a_creation_that_was_killed_while_it_gave_names(tmp_path, small):
    paths = [tmp_path / f"state-{index}" for index in range(3)]
    small.create(paths).close()
    for path in paths[1:]:
        path.rename(path.with_name(path.name + ".partial"))
    with StateStore.open(paths) as store:
        small.assert_exact(store)
        small.advance(store)
    assert sorted(tmp_path.iterdir()) == paths
    paths[0].rename(tmp_path / "state-0.partial")
    (tmp_path / "state-0.partial").write_bytes(b"x" * 8192 * 2)
    with pytest.raises(StateError, match=r"state-0.partial must begin with"):
        StateStore.open(paths)


# Damage


def test_every_extent_is_checked(stored, small):
    with StateStore.open(stored) as store:
        places = []
        for array in small.arrays:
            for extent in small.manifest.extents:
                file = store._files[store.device_of(extent)]
                places.append((array.name, extent, file.path, file.layout.array_offset(1, array.name, extent) + 77))
    for array, extent, path, offset in places:
        flip(path, offset)
        before = contents(stored)
        with StateStore.open(stored) as store:
            with pytest.raises(
                StateError, match=f"{path}: array {array} of step 3 is damaged in tensors .*file offset"
            ):
                store.read(array, extent, aligned_buffer(extent.size_bytes))
            (message,) = store.verify()
            assert small.manifest.names_in(extent) in message and str(offset - 77) in message
        assert contents(stored) == before
        flip(path, offset)


def test_damaged_last_superblock_opens_the_step_before(stored, small):
    flip(stored[-1], BLOCK_BYTES + 60)
    with pytest.warns(LostStepWarning):
        store = StateStore.open(stored)
    with store:
        assert store.steps == 2
        small.assert_exact(store)
        small.advance(store)
        small.assert_exact(store)


def test_damaged_superblock_and_overwritten_slot_is_refused(stored, small):
    with StateStore.open(stored) as store:
        for extent in small.manifest.extents[:2]:
            store.write("m", extent, aligned_buffer(extent.size_bytes))
    flip(stored[-1], BLOCK_BYTES + 60)
    before = contents(stored)
    with pytest.raises(StateError, match=r"one superblock is damaged.*array m of step 2"):
        StateStore.open(stored)
    assert contents(stored) == before


def test_wrong_length_is_refused(stored, small):
    with StateStore.open(stored) as store, pytest.raises(AlignmentError, match="must have the extent's 4096 bytes"):
        store.read("p", small.manifest.extents[0], aligned_buffer(2 * BLOCK_BYTES))


# Rollback


def test_rollback_is_the_step_before(stored, small):
    with StateStore.open(stored) as store:
        small.advance(store)
        store.rollback()
        assert store.steps == 3
        small.assert_exact(store)
        with pytest.raises(StateError, match="holds no step before 3"):
            store.rollback()
    with StateStore.open(stored) as store:
        assert store.steps == 3
        small.assert_exact(store)
        with pytest.raises(StateError, match="holds no step before 3"):
            store.rollback()
        small.advance(store, 2)
        small.assert_exact(store)


def test_rollback_of_a_store_just_opened(stored, small):
    with StateStore.open(stored) as store:
        store.rollback()
        assert store.steps == 2
        small.assert_exact(store)
    with StateStore.open(stored) as store:
        small.assert_exact(store)
        assert store.steps == 2


def test_rollback_after_a_write_began(stored, small):
    extent = small.manifest.extents[0]
    with StateStore.open(stored) as store:
        small.advance(store)
        store.write("p", extent, aligned_buffer(extent.size_bytes))
        store.discard()
        with pytest.raises(StateError, match="before the next write begins; step 4 stays"):
            store.rollback()
        small.assert_exact(store)
    with StateStore.open(stored) as store:
        with pytest.raises(StateError, match=r"step 3 was written over and step 4 stays: .*array p"):
            store.rollback()
        small.assert_exact(store)
        small.advance(store)
        small.assert_exact(store)


def test_nothing_before_the_first_step(paths, small):
    with small.create(paths) as store, pytest.raises(StateError, match="holds no step before 0"):
        store.rollback()


@pytest.mark.filterwarnings("ignore::nearflash.abi.errors.LostStepWarning")
@pytest.mark.parametrize("reopen", [False, True])
def test_an_undone_step_does_not_come_back(stored, small, reopen):
    """Damage to the superblock that took the undone step's place must not bring that step back."""
    with StateStore.open(stored) as store:
        store.rollback()
    if reopen:
        StateStore.open(stored).close()
    flip(stored[0], BLOCK_BYTES + 20)
    with StateStore.open(stored) as store:
        assert store.steps == 2
        small.assert_exact(store)


def test_a_step_may_leave_extents_as_they_are(stored, small):
    """They cost no write, stay readable, and can be changed and undone later, also after opening again."""

    def write(store, step, extents):
        for extent in extents:
            for array in small.arrays:
                store.write(array.name, extent, small.memory_of(store.manifest, array.name, extent, step))

    def expect(store, steps):
        for extent in store.manifest.extents:
            for array in small.arrays:
                memory = aligned_buffer(array.extent_bytes(extent))
                store.read(array.name, extent, memory)
                wanted = small.memory_of(store.manifest, array.name, extent, steps[extent.index])
                assert np.array_equal(memory, wanted), (array, extent)

    with StateStore.open(stored) as store:
        first, second, third = store.manifest.extents
        write(store, 4, [second])
        with pytest.raises(StateError, match="3 are not"):
            store.commit((4, 4, 3), extents=[second, third])
        store.commit((4, 4, 3), extents=[second])
        expect(store, [3, 4, 3])
        write(store, 5, [first])
        store.commit((5, 4, 3), extents=[first])
        expect(store, [5, 4, 3])
        store.rollback()
        expect(store, [3, 4, 3])
        write(store, 6, [first, second])
        store.commit((5, 4, 3), extents=[first, second])
        store.write("p", third, small.memory_of(store.manifest, "p", third, 7))
        store.commit((5, 4, 3), extents=[third], arrays=["p"])
    with StateStore.open(stored) as store:
        assert store.steps == 6 and store.verify() == []
        store.rollback()
        expect(store, [6, 6, 3])
