"""Snapshots: the committed step, openable at once, shared or copied."""

import fcntl
import os
import shutil

import pytest

from nearflash.abi.errors import StateError
from nearflash.storage import StateStore
from nearflash.storage.state import state_store
from nearflash.storage.state.snapshot import FICLONE
from nearflash.support.files import give_name


@pytest.fixture(params=["copied", "reflinked"])
def file_system(request, monkeypatch):
    """One without reflinks, and one with."""

    def ioctl(fd, number, source):
        assert number == FICLONE
        if request.param == "copied":
            raise OSError(95, "Operation not supported")
        os.write(fd, os.pread(source, 1 << 30, 0))

    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    return request.param


def test_a_snapshot_is_the_committed_step(stored, small, tmp_path, file_system):
    folder = tmp_path / "new" / "snapshot"
    with StateStore.open(stored) as store:
        small.write_step(store)
        copies = store.snapshot(folder)
        store.commit(small.tensor_steps(store, 4), {"cursor": 4})
        small.advance(store)
        identity = store.identity
    assert sorted(folder.iterdir()) == copies and [path.name for path in copies] == [path.name for path in stored]
    with StateStore.open(copies) as store:
        assert (store.steps, store.identity) == (3, identity)
        small.assert_exact(store)
        assert store.verify() == []
        small.advance(store)
        small.assert_exact(store)
    with StateStore.open(stored) as store:
        assert store.steps == 5
        small.assert_exact(store)


def test_a_snapshot_keeps_its_room(stored, small, tmp_path):
    """What training on from it will need is reserved, so that it does not fail for want of space."""
    with StateStore.open(stored) as store:
        copies = store.snapshot(tmp_path / "snapshot")
    for path, other in zip(copies, stored, strict=True):
        assert path.stat().st_size == other.stat().st_size
        assert path.stat().st_blocks * 512 >= path.stat().st_size


def test_a_snapshot_of_files_one_step_apart(pair, small, tmp_path, file_system):
    shutil.copy(pair[0], tmp_path / "old")
    with StateStore.open(pair) as store:
        small.advance(store)
    shutil.copy(tmp_path / "old", pair[0])
    with StateStore.open(pair) as store:
        copies = store.snapshot(tmp_path / "snapshot")
    with StateStore.open(copies) as store:
        assert store.steps == 3
        small.assert_exact(store)


def test_files_of_the_same_name(tmp_path, small):
    paths = [tmp_path / "a" / "state", tmp_path / "b" / "state"]
    for path in paths:
        path.parent.mkdir()
    with small.create(paths) as store:
        assert [path.name for path in store.snapshot(tmp_path / "snapshot")] == ["state.0", "state.1"]


def test_snapshots_into_one_folder(stored, small, tmp_path, file_system, monkeypatch):
    """The later one replaces the earlier one, complete or not at all; another file's name is refused."""
    folder = tmp_path / "snapshot"
    with StateStore.open(stored) as store:
        store.snapshot(folder)
        small.advance(store)
        assert sorted(folder.iterdir()) == store.snapshot(folder)
        before = {path: path.read_bytes() for path in folder.iterdir()}
        small.advance(store)
        with StateStore.open(list(before)), pytest.raises(StateError, match="in use"):
            store.snapshot(folder)
        with pytest.raises(StateError, match="in use"):
            store.snapshot(stored[0].parent)
        with monkeypatch.context() as patch:
            patch.setattr(state_store, "copy", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                store.snapshot(folder)
        assert before == {path: path.read_bytes() for path in folder.iterdir()}
        with StateStore.open(list(before)) as copied:
            assert copied.steps == 4
            small.assert_exact(copied)
        (folder / stored[-1].name).write_bytes(b"a thesis" * 1000)
        with pytest.raises(StateError, match="must be an earlier snapshot of this state"):
            store.snapshot(folder)
        assert (folder / stored[-1].name).read_bytes() == b"a thesis" * 1000


def test_killed_while_a_snapshot_replaces_another(pair, small, tmp_path, monkeypatch):
    """Between the names of two files: opening it completes it."""
    names = []

    def killed(source, path):
        if len(names) == 3:
            raise KeyboardInterrupt
        names.append(path)
        give_name(source, path)

    with StateStore.open(pair) as store:
        store.snapshot(tmp_path / "snapshot")
        small.advance(store, 5)
        monkeypatch.setattr(state_store, "give_name", killed)
        with pytest.raises(KeyboardInterrupt):
            store.snapshot(tmp_path / "snapshot")
    with StateStore.open([tmp_path / "snapshot" / path.name for path in pair]) as store:
        assert store.steps == 8
        small.assert_exact(store)


@pytest.mark.parametrize("existing", [False, True], ids=["new", "existing"])
def test_damage_is_not_copied(stored, tmp_path, existing):
    folder = tmp_path / "new" / "snapshot"
    if existing:
        folder.mkdir(parents=True)
    with StateStore.open(stored) as store:
        file = store._files[-1]
        offset = file.layout.array_offset(1, "v", file.layout.extents[-1])
    data = bytearray(stored[-1].read_bytes())
    data[offset] ^= 1
    stored[-1].write_bytes(data)
    with StateStore.open(stored) as store, pytest.raises(StateError, match="array v of step 3 is damaged"):
        store.snapshot(folder)
    assert list(folder.iterdir()) == [] if existing else not folder.parent.exists()
