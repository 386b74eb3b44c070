"""A state of other tensors in the place of one: all of what was stored is carried, whenever power is lost."""

import numpy as np
import pytest

from nearflash.abi.errors import StateError, StorageFullError
from nearflash.storage import Manifest, StateStore
from nearflash.storage.state import state_file
from nearflash.storage.state.carry import carry_over
from nearflash.storage.state.manifest import StateArray
from nearflash.storage.state.state_file import StateFile

ARRAYS = (
    StateArray("p"),
    StateArray("m", 2, 1, "exp_avg"),
    StateArray("v", 1, 1, "exp_avg_sq"),
    StateArray("v_scale", 1, 32),
    StateArray("residual", 1, 2),
)
OLD = Manifest.pack([("a", (2500,), "float32"), ("b", (33,), "float32"), ("c", (900,), "float32")], 1024, ARRAYS)
NEW = Manifest.pack(
    [
        ("new", (70,), "float32"),
        ("b", (33,), "float32"),
        ("a", (2500,), "float32"),
        ("c", (900,), "bfloat16"),
        ("d", (5,), "float32"),
    ],
    2048,
    (*ARRAYS, StateArray("extra", 4)),
)


def parts(store):
    """The bytes of each tensor in each array, padding included."""
    whole = {array.name: store.read_array(array.name).view(np.uint8) for array in store.manifest.arrays}
    return {
        (array.name, entry.name): whole[array.name][array.size_bytes(entry.start) :][
            : array.size_bytes(entry.stop - entry.start)
        ].tobytes()
        for array in store.manifest.arrays
        for entry in store.manifest.tensors
    }


def fill_of_new(store):
    return carry_over(store, NEW, lambda extent, out: out.fill(7.0))


def replace(store, small, steps=(0, 3, 3, 0, 0)):
    return store.replace(NEW, fill_of_new(store), store.stamp, steps, {"more": (1,)})


def test_tensors_are_carried(paths, small):
    with small.create(paths, OLD) as store:
        small.advance(store, 3)
        before, identity = parts(store), store.identity
        new = replace(store, small)
        with pytest.raises(StateError):
            store.read_array("p")
        new.close()
    with StateStore.open(paths) as store:
        assert (store.steps, store.identity, store.tensor_steps) == (3, identity, (0, 3, 3, 0, 0))
        assert store.metadata == {"more": (1,)} and store.verify() == []
        found = parts(store)
        for array in ARRAYS:
            for name in ("a", "b"):
                assert found[array.name, name] == before[array.name, name], (array, name)
            for name in ("new", "c", "d"):  # c has another dtype
                values = np.frombuffer(found[array.name, name], np.float32 if array.name == "p" else np.uint8)
                assert (values == (7.0 if array.name == "p" else 0)).all()
        with pytest.raises(StateError, match="no step before"):
            store.rollback()
    assert sorted(paths[0].parent.iterdir()) == sorted(paths)


def test_damage_and_a_full_disk_leave_the_state_as_it_was(paths, small, monkeypatch):
    with small.create(paths, OLD) as store:
        small.advance(store, 3)

        def full(*_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("os.posix_fallocate", full)
            with pytest.raises(StorageFullError):
                replace(store, small)
        with monkeypatch.context() as patch:
            patch.setattr(state_file, "crc32c", lambda data: 1)
            with pytest.raises(StateError, match="is damaged"):
                replace(store, small)
        small.assert_exact(store)
        small.advance(store)
    assert sorted(paths[0].parent.iterdir()) == sorted(paths)


@pytest.mark.parametrize("renamed", [0, 1, 2])
def test_killed_while_files_get_their_names(tmp_path, small, monkeypatch, renamed):
    """All files are then complete; from the first name on the new state opens, before it the old one."""
    paths = [tmp_path / "a", tmp_path / "b"]
    real, done = StateFile.replace, []

    def killed(file, path):
        if len(done) == renamed:
            raise KeyboardInterrupt
        done.append(path)
        real(file, path)

    store = small.create(paths, OLD)
    small.advance(store, 3)
    with monkeypatch.context() as patch:
        patch.setattr(StateFile, "replace", killed)
        patch.setattr("nearflash.storage.state.state_store.discard_files", lambda files: [f.close() for f in files])
        if renamed < 2:
            with pytest.raises(KeyboardInterrupt):
                replace(store, small)
        else:
            replace(store, small).close()
        if renamed == 1:
            with pytest.raises(StateError, match="close and open again"):
                store.write("p", OLD.extents[0], small.memory_of(OLD, "p", OLD.extents[0], 4))
    store.close()
    with StateStore.open(paths[::-1]) as found:
        assert found.manifest == (NEW if renamed else OLD) and found.steps == 3 and found.verify() == []
        small.write_step(found)
        found.commit([4] * len(found.manifest.tensors), {})
