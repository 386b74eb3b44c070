"""Crash points of stores whose sequences outlast them: there are none that are wrong, and wrong ones are found."""

import pytest

from nearflash.bench.storage.kept_crashes import find_kept_crash_points
from nearflash.storage.kv.pool import PagePool


@pytest.mark.parametrize(
    ("actions", "journal", "pages", "continued"), [(2, 10, 50, 5), pytest.param(3, 20, 100, 10, marks=pytest.mark.full)]
)
def test_no_image_of_a_life_is_wrong(tmp_path, actions, journal, pages, continued):
    found = find_kept_crash_points(tmp_path / "kv", actions=actions, tries=1, seed=1)
    assert found.journal_images > journal and found.page_images > pages and found.continued > continued
    assert not found.bad
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("actions", "images"), [(7, 50), pytest.param(12, 100, marks=pytest.mark.full)])
def test_no_end_of_a_journal_is_wrong(tmp_path, actions, images):
    found = find_kept_crash_points(tmp_path / "kv", actions=actions, tries=0, seed=1)
    assert found.journal_images > images and not found.page_images and not found.bad


def test_pages_ahead_of_their_journal_are_found(tmp_path):
    """The control: an older note names K and V of newer tokens."""
    found = find_kept_crash_points(tmp_path / "kv", actions=6, tries=0, seed=1, ahead=False)
    assert any("that its note does not state" in one for one in found.bad)


def test_a_flush_that_leaves_pages_in_memory_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(PagePool, "flush", lambda self: None)
    found = find_kept_crash_points(tmp_path / "kv", actions=6, tries=0, seed=1)
    assert any("tokens of note" in one for one in found.bad)
