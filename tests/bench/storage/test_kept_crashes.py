"""Crash points of stores whose sequences outlast them: there are none that are wrong, and wrong ones are found."""

from nearflash.bench.storage.kept_crashes import kept_crash_points
from nearflash.storage.kv.pool import PagePool


def test_no_image_of_a_life_is_wrong(tmp_path):
    found = kept_crash_points(tmp_path / "kv", actions=10, tries=1, seed=2)
    assert found.points > 50 and not found.bad
    assert not list(tmp_path.iterdir())


def test_a_flush_that_leaves_pages_in_memory_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(PagePool, "flush", lambda self: None)
    found = kept_crash_points(tmp_path / "kv", actions=10, tries=1, seed=2)
    assert any("tokens, not" in one for one in found.bad)
