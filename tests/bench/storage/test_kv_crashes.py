"""A small part of the crash bench's KV store; and that it notices a store that breaks its promise."""

import pytest

from nearflash.bench.storage.kv_crashes import kv_crash_points
from nearflash.storage.flash.file import FileFlash
from nearflash.storage.kv.stage import PageStage


@pytest.mark.parametrize(("actions", "erases"), [(36, 4), pytest.param(50, 6, marks=pytest.mark.full)])
def test_whatever_was_flushed_is_found(tmp_path, actions, erases):
    found = kv_crash_points(tmp_path / "kv", actions=actions, tries=1, seed=2)
    assert found.bad == []
    assert found.points > 300 and found.erases >= erases


@pytest.mark.full
def test_a_block_that_is_erased_before_its_pages_are_durable_is_noticed(tmp_path, monkeypatch):
    """Garbage collection did so: power loss took tokens that a returned flush had covered."""
    monkeypatch.setattr(PageStage, "_erase", lambda self, block: self._flash.erase(block))
    assert kv_crash_points(tmp_path / "kv", actions=45, tries=4, seed=2).bad


@pytest.mark.full
def test_a_flush_that_does_nothing_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(FileFlash, "sync", lambda self: None)
    assert kv_crash_points(tmp_path / "kv", actions=20, tries=2, seed=1).bad
