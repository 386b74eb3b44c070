"""A small part of the crash bench; and that it notices a store that breaks its promises."""

import dataclasses

import pytest

from nearflash.bench.storage import crashes
from nearflash.bench.storage.crashes import crash_points
from nearflash.bench.storage.history import FORMATS
from nearflash.storage.state.state_file import StateFile


@pytest.mark.parametrize(
    ("files", "tries", "points", "newer"),
    [
        pytest.param(1, 8, 1500, 20, marks=pytest.mark.full),
        pytest.param(2, 8, 1500, 20, marks=pytest.mark.full),
        (2, 2, 400, 5),
    ],
)
def test_every_image_recovers(tmp_path, files, tries, points, newer):
    found = crash_points(tmp_path, files=files, steps=2, tries=tries, seed=files)
    assert found.bad == []
    assert found.points > points and found.newer > newer


@pytest.mark.full
def test_every_image_of_a_split_master_recovers(tmp_path):
    """Changes of weights behind whole ones, and whole ones again."""
    found = crash_points(tmp_path, files=1, steps=3, tries=2, seed=1, manifest=FORMATS["split"])
    assert found.bad == []
    assert found.points > 800 and found.newer > 5


@pytest.mark.full
def test_changes_of_weights_over_committed_ones_are_noticed(tmp_path, monkeypatch):
    real = StateFile.write

    def write(self, step, array, extent, memory, before=None):
        if (last := self._version) is not None and before is not None:
            placed = last.extents[array, extent.index]
            shifted = {**last.extents, (array, extent.index): placed._replace(logged_bytes=0)}
            self._version = dataclasses.replace(last, extents=shifted)
        try:
            return real(self, step, array, extent, memory, before)
        finally:
            self._version = last

    monkeypatch.setattr(StateFile, "write", write)
    found = crash_points(tmp_path, files=1, steps=3, tries=2, seed=1, manifest=FORMATS["split"])
    assert any("not exactly" in wrong for wrong in found.bad)


def test_a_commit_without_its_flush_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(StateFile, "flush", lambda self: None)
    found = crash_points(tmp_path, files=1, steps=1, tries=12, seed=1)
    assert any("damaged" in wrong or "not exactly" in wrong for wrong in found.bad)


@pytest.mark.full
def test_an_undone_step_that_comes_back_is_noticed(tmp_path, monkeypatch):
    real = StateFile._write_superblock
    monkeypatch.setattr(StateFile, "_write_superblock", lambda self, block, alone: real(self, block, alone=False))
    assert crash_points(tmp_path, files=1, steps=2, tries=4, seed=1).bad


@pytest.mark.full
def test_files_that_drift_apart_are_noticed(tmp_path, monkeypatch):
    """The second file's superblock is written a step late: what `_level` holds together falls apart."""
    real = StateFile.confirm
    monkeypatch.setattr(StateFile, "confirm", lambda self: real(self) if self.index == 0 else None)
    assert crash_points(tmp_path, files=2, steps=2, tries=4, seed=1).bad


def test_few_pending_blocks_are_tried_in_all_subsets():
    rng = crashes.np.random.default_rng(1)
    images = [image.any(axis=1).tobytes() for image in crashes.images(4, 0, rng)]
    assert len(set(images)) == len(images) == 16
    assert all(image.shape == (30, 8) for image in crashes.images(30, 10, rng))
