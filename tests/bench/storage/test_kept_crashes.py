"""Crash points of stores whose sequences outlast them: there are none that are wrong, and wrong ones are found."""

import pytest

from nearflash.bench.storage.kept_crashes import kept_crash_points
from nearflash.storage.kv.sequences import Sequences


def test_no_image_of_a_life_is_wrong(tmp_path):
    found = kept_crash_points(tmp_path / "kv", actions=14, tries=1, seed=2)
    assert found.points > 50 and not found.bad
    assert not list(tmp_path.iterdir())


def test_sequences_that_are_not_noted_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(Sequences, "_note", lambda self, number, token_tags, index_tags: None)
    with pytest.raises(KeyError):
        kept_crash_points(tmp_path / "kv", actions=20, tries=1, seed=2)
