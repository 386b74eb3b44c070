"""Which files are taken as one state, in which order and at which step."""

import shutil

import numpy as np
import pytest

from nearflash.abi.errors import StateError
from nearflash.storage import Manifest, StateStore


def test_any_order(pair, small):
    with StateStore.open(pair[::-1]) as store:
        assert store.paths == tuple(pair)
        small.assert_exact(store)


@pytest.mark.parametrize("ratio", [(1, 1, 1), (2, 1, 1), (1, 3, 2)])
def test_extents_are_striped_by_ratio(tmp_path, small, ratio):
    manifest = Manifest.pack([("w", (12 * 1024 - 5,), "float32")], 1024)
    paths = [tmp_path / f"state-{index}" for index in range(3)]
    with small.create(paths, manifest, stripe_ratio=ratio) as store:
        shares = [store.extents_of(device) for device in range(3)]
        assert [len(share) for share in shares] == [12 * part // sum(ratio) for part in ratio]
        assert all(store.device_of(extent) == device for device, share in enumerate(shares) for extent in share)
        assert sorted(extent.index for share in shares for extent in share) == list(range(12))
        small.advance(store)
    with StateStore.open(paths) as store:
        assert store.stripe_ratio == ratio
        small.assert_exact(store)
    sizes = np.array([path.stat().st_size for path in paths])
    assert (np.argsort(sizes, kind="stable") == np.argsort(ratio, kind="stable")).all()


@pytest.mark.parametrize("target", ["gone", "gone/state", "link"])
def test_a_link_to_nothing_is_refused_before_anything_is_written(tmp_path, small, target):
    """A whole state was written first, and then "another one was written meanwhile" named."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path / target)
    with pytest.raises(
        StateError, match=f"{link} must be a free name, not a link to {tmp_path / target}, where nothing"
    ):
        small.create(link)
    with pytest.raises(
        StateError, match=f"{link} must be a state file, not a link to {tmp_path / target}, where nothing"
    ):
        StateStore.open(link)
    assert link.is_symlink() and list(tmp_path.iterdir()) == [link]


def test_more_files_than_extents(tmp_path, small):
    paths = [tmp_path / f"state-{index}" for index in range(6)]
    with small.create(paths) as store:
        small.advance(store)
        assert store.extents_of(5) == ()
    with StateStore.open(paths) as store:
        small.assert_exact(store)


@pytest.mark.parametrize("ratio, message", [((1,), "of 2 files"), ((0, 1), "at least 1"), ((1.5, 1), "integer")])
def test_ratios_that_make_no_sense(tmp_path, small, ratio, message):
    with pytest.raises(StateError, match=message):
        small.create([tmp_path / "a", tmp_path / "b"], stripe_ratio=ratio)


def test_missing_file(pair):
    with pytest.raises(StateError, match=f"state of {pair[0]} has 2 files, not 1: give also number 1"):
        StateStore.open(pair[:1])
    with pytest.raises(StateError, match="give also number 0"):
        StateStore.open(pair[1:])
    pair[1].unlink()
    with pytest.raises(StateError, match=f"{pair[1]} must be a state file, not a missing one"):
        StateStore.open(pair)


def test_same_file_twice(pair, tmp_path):
    shutil.copy(pair[0], tmp_path / "copy")
    with pytest.raises(StateError, match=r"copy and .*state-a hold the same extents|state-a and .*copy hold the same"):
        StateStore.open([pair[0], tmp_path / "copy"])


def test_file_of_another_state(pair, tmp_path, small):
    with small.create([tmp_path / "x", tmp_path / "y"]) as other:
        small.advance(other, 3)
    with pytest.raises(StateError, match=r"y belongs to another state than .*state-a"):
        StateStore.open([pair[0], tmp_path / "y"])


def test_unequal_stripes(pair, tmp_path, small, monkeypatch):
    monkeypatch.setattr("secrets.token_hex", lambda _: "0" * 16)
    one, other = [tmp_path / "a", tmp_path / "b"], [tmp_path / "c", tmp_path / "d"]
    small.create(one).close()
    small.create(other, stripe_ratio=(2, 1)).close()
    with pytest.raises(StateError, match=r"d must be striped \(1, 1\) as .*a is, not \(2, 1\)"):
        StateStore.open([one[0], other[1]])


def test_files_one_step_apart_open_at_the_smaller(pair, tmp_path, small):
    shutil.copy(pair[1], tmp_path / "old")
    with StateStore.open(pair) as store:
        small.advance(store)
    shutil.copy(tmp_path / "old", pair[1])
    before = [path.read_bytes() for path in pair]
    with StateStore.open(pair) as store:
        assert store.steps == 3
        small.assert_exact(store)
        assert [path.read_bytes() for path in pair] == before
        small.advance(store)
        small.assert_exact(store)
    with StateStore.open(pair) as store:
        assert store.steps == 4
        small.assert_exact(store)


def test_files_further_apart_are_rejected(pair, tmp_path, small):
    shutil.copy(pair[1], tmp_path / "old")
    with StateStore.open(pair) as store:
        small.advance(store, 2)
    shutil.copy(tmp_path / "old", pair[1])
    with pytest.raises(StateError, match=r"state-b must be at the step of .*state-a, 5, or one before it, not at 3"):
        StateStore.open(pair)


def test_an_older_file_whose_partner_continued_is_rejected(pair, tmp_path, small):
    with StateStore.open(pair) as store:
        shutil.copy(pair[1], tmp_path / "old")
        small.advance(store)
        small.write_step(store)
    shutil.copy(tmp_path / "old", pair[1])
    with pytest.raises(StateError, match=r"state-b is one step older, and that step of .*state-a is gone: .*array p"):
        StateStore.open(pair)


def test_two_histories_are_not_mixed(pair, tmp_path, small):
    with StateStore.open(pair) as store:
        small.advance(store)
        shutil.copy(pair[1], tmp_path / "undone")
        store.rollback()
        small.advance(store)
    shutil.copy(tmp_path / "undone", pair[1])
    with pytest.raises(StateError, match=r"step 4 of .*state-b is of another history than that of .*state-a"):
        StateStore.open(pair)


def test_locked_file(pair):
    with StateStore.open(pair), pytest.raises(StateError, match="state-b is in use by another process"):
        StateStore.open(pair[::-1])
    StateStore.open(pair).close()


def test_a_round_is_not_endless(tmp_path, small):
    """1000000000,1 had hung, given or read from a file."""
    with pytest.raises(StateError, match=r"stripe_ratio must sum to at most 4096, not .*: give 3,1 for 3000,1000"):
        small.create([tmp_path / "a", tmp_path / "b"], small.manifest, stripe_ratio=(10**9, 1))
