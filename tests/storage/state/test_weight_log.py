"""Weights of a split master: what a step changes of them, behind the last ones that were written whole."""

import numpy as np
import pytest

from nearflash.abi.errors import StateError, StreamError
from nearflash.abi.optimizers import MasterFormat
from nearflash.storage import Manifest, StateArray, StateStore, aligned_buffer
from nearflash.storage.io.backend import BLOCK_BYTES
from nearflash.storage.io.sealed import seal, unseal
from nearflash.storage.state.state_file import StateFile
from nearflash.storage.state.weight_log import WHOLE_STEPS, apply_changes, find_changes

PARAMS = 8192
HALF_BYTES = 2 * PARAMS
MANIFEST = Manifest.pack([("w", (3 * PARAMS,), "bfloat16")], PARAMS, [StateArray("p")], MasterFormat.SPLIT)


def make_weights(params=PARAMS, seed=1):
    memory = aligned_buffer(2 * params)
    memory[:] = np.random.default_rng(seed).integers(0, 256, memory.size, np.uint8)
    return memory


def change(weights, words, seed=2):
    after = aligned_buffer(weights.size)
    after[:] = weights
    places = np.random.default_rng(seed).choice(weights.size // 2, words, replace=False)
    after.view(np.uint16)[places] ^= 1
    return after


@pytest.mark.parametrize("words", [0, 1, 700, 2000])
def test_changes_lead_from_weights_to_weights(words):
    before = make_weights(2 * PARAMS)
    after = change(before, words)
    changes = find_changes(before, after)
    assert changes.size % BLOCK_BYTES == 0 and changes.size <= BLOCK_BYTES * (1 + words * 4 // BLOCK_BYTES + 1)
    again = change(after, 30, seed=3)
    both = np.concatenate([changes, find_changes(after, again)])
    apply_changes(both, before)
    np.testing.assert_array_equal(before, again)


def test_changes_that_do_not_pay_are_none():
    before = make_weights()
    assert find_changes(before, make_weights(seed=9)) is None
    assert find_changes(before, change(before, 2100)) is None
    assert find_changes(before, change(before, 1)).size == BLOCK_BYTES


@pytest.mark.parametrize("at", [0, 8, 20, 40, 200])
def test_damaged_changes_are_refused(at):
    before = make_weights()
    changes = find_changes(before, change(before, 300))
    changes[at] ^= 0x40
    with pytest.raises(StreamError, match="a delta must be as its header and checksums state"):
        apply_changes(changes, before)


@pytest.fixture
def paths(tmp_path):
    return [tmp_path / "a", tmp_path / "b"]


@pytest.fixture
def store(paths):
    with StateStore.create(paths, MANIFEST, profile="ieee", initial=lambda extent, out: None, direct=False) as store:
        yield store


def step(store, weights, words=100, extents=MANIFEST.extents, commit=True):
    """Change so many words of each extent's weights; returns the bytes that were written of them, by extent."""
    written = []
    for extent in extents:
        held = aligned_buffer(HALF_BYTES)
        store.read("weight", extent, held)
        np.testing.assert_array_equal(held, weights[extent.index])
        after = change(held, words, seed=store.steps)
        written.append(store.write("weight", extent, after, held))
        rest = make_weights(seed=store.steps)
        assert store.write("rest", extent, rest, rest) == HALF_BYTES  # only of weights there is a log
        if commit:
            weights[extent.index] = after
    if commit:
        store.commit([store.steps + 1], extents=extents)
    else:
        store.discard()
    return written


def held(store):
    return [store.read_array("weight").view(np.uint8)[e.start * 2 : e.stop * 2] for e in store.manifest.extents]


def assert_at(store, weights):
    for mine, theirs in zip(held(store), weights, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert store.verify() == []


def zeros():
    return [aligned_buffer(HALF_BYTES) for _ in MANIFEST.extents]


def test_weights_are_written_whole_when_their_room_is_full(store, paths):
    """Two halves' room: eight steps of a block each, then all; after each step the same weights are there, reopened."""
    weights, written = zeros(), []
    for _ in range(20):
        written.append(step(store, weights))
        assert_at(store, weights)
        store.close()
        store = StateStore.open(paths[::-1], direct=False)
        assert_at(store, weights)
    assert [one for one, *_ in written] == [*[BLOCK_BYTES] * 8, HALF_BYTES] * 2 + [BLOCK_BYTES] * 2
    assert all(len(set(one)) == 1 for one in written)
    store.close()


def test_a_large_change_is_written_whole_at_once(store):
    weights = zeros()
    assert step(store, weights, words=PARAMS) == [HALF_BYTES] * 3
    assert step(store, weights) == [BLOCK_BYTES] * 3
    assert_at(store, weights)


def test_after_a_large_change_the_next_steps_look_for_none(store):
    """Of that extent; then they look again."""
    first, second, _ = MANIFEST.extents
    weights = zeros()
    assert not store.begin_uncompared(first)
    step(store, weights, words=PARAMS, extents=[first])
    step(store, weights, extents=[second])
    assert [store.begin_uncompared(first) for _ in range(WHOLE_STEPS + 2)] == [True] * WHOLE_STEPS + [False] * 2
    assert not store.begin_uncompared(second)


def test_other_weights_than_those_committed_are_no_base(store):
    extent, after = MANIFEST.extents[0], make_weights()
    assert store.write("weight", extent, after, change(after, 3)) == HALF_BYTES
    store.discard()


@pytest.mark.parametrize("before", [0, 3, 7, 8, 9])
def test_a_step_that_is_undone_or_lost_leaves_the_one_before(store, paths, before):
    """Within the log, where it gets full, and behind whole weights; the next step goes on from there."""
    weights = zeros()
    for _ in range(before):
        step(store, weights)
    step(store, weights, words=50, commit=False)
    assert_at(store, weights)
    kept = [one.copy() for one in weights]
    step(store, weights)
    store.rollback()
    assert_at(store, kept)
    step(store, kept, words=70)
    store.close()
    with StateStore.open(paths, direct=False) as again:
        assert_at(again, kept)
        again.rollback()
        step(again, [one.copy() for one in held(again)], words=90)


def test_a_commit_that_one_file_alone_has_is_undone(store, paths, monkeypatch):
    weights = zeros()
    for _ in range(3):
        step(store, weights)
    confirm = StateFile.confirm

    def fail(file):
        if file.index:
            raise StateError("power lost")
        confirm(file)

    with monkeypatch.context() as patch:
        patch.setattr(StateFile, "confirm", fail)
        with pytest.raises(StateError, match="power lost"):
            step(store, [one.copy() for one in weights], words=120)
    store.close()
    with StateStore.open(paths, direct=False) as again:
        assert again.steps == 3
        assert_at(again, weights)
        step(again, weights)
        assert_at(again, weights)


def test_extents_that_a_step_leaves_keep_their_log(store):
    weights = zeros()
    for number in range(6):
        step(store, weights, extents=MANIFEST.extents[number % 2 :])
    assert_at(store, weights)


def test_a_snapshot_has_the_weights(store, tmp_path):
    weights = zeros()
    for _ in range(3):
        step(store, weights)
    with StateStore.open(store.snapshot(tmp_path / "copy"), direct=False) as copy:
        assert_at(copy, weights)
        mine = [one.copy() for one in weights]
        step(copy, mine)
        assert_at(copy, mine)
    assert_at(store, weights)


def test_damage_in_the_log_is_named(store):
    weights = zeros()
    step(store, weights)
    step(store, weights)
    (file, *_) = store._files
    offset = file.layout.log_offset(file.layout.extents[0])
    for at in (0, 100, BLOCK_BYTES + 20):
        with file.path.open("r+b") as raw:
            raw.seek(offset + at)
            byte = raw.read(1)
            raw.seek(offset + at)
            raw.write(bytes([byte[0] ^ 8]))
        (message,) = store.verify()
        assert "array weight of step 2 is damaged in tensors 'w' (parameters [0, 8192))" in message
        with file.path.open("r+b") as raw:
            raw.seek(offset + at)
            raw.write(byte)
    assert store.verify() == []


@pytest.mark.parametrize("column", [[1], [4096, 4096, 4096, 4096], [-4096], [12 * BLOCK_BYTES, 0], "4096"])
def test_a_table_with_another_log_is_refused(store, paths, column):
    step(store, zeros())
    (file, *_) = store._files
    superblock = file.version.superblock
    offset = file.layout.table_offset(superblock.step)
    content = paths[0].read_bytes()
    body = unseal("table", np.frombuffer(content[offset : offset + superblock.table_bytes], np.uint8))
    assert body["logged"] == {"weight": [BLOCK_BYTES] * len(file.layout.extents)}
    assert seal("table", body).nbytes == superblock.table_bytes
    what = "the checksum table"
    with pytest.raises(StateError, match=r"logged in the checksum table must (be|have) "):
        file._check_logged(what, {"weight": column})
    with pytest.raises(StateError, match="must be an object of weight"):
        file._check_logged(what, {"rest": [0, 0]})


def test_states_of_whole_masters_have_no_log(tmp_path):
    manifest = Manifest.pack([("w", (PARAMS,), "float32")], PARAMS)
    with StateStore.create(
        tmp_path / "s", manifest, profile="ieee", initial=lambda extent, out: None, direct=False
    ) as store:
        assert store._files[0].layout.log_bytes(manifest.extents[0]) == 0
        memory = aligned_buffer(manifest.extents[0].size_bytes)
        store.read("p", manifest.extents[0], memory)
        assert store.write("p", manifest.extents[0], memory, memory) == memory.size
