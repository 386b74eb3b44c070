"""Crash points of block stores: there are none that are wrong, and wrong ones are found."""

import pytest

from nearflash.bench.storage.block_crashes import block_crash_points
from nearflash.storage.blocks.segment_log import SegmentLog
from nearflash.storage.io.direct import DirectFile


@pytest.mark.parametrize(("actions", "erases"), [(4, 1), pytest.param(40, 10, marks=pytest.mark.full)])
def test_no_image_of_a_life_is_wrong(tmp_path, actions, erases):
    found = block_crash_points(tmp_path / "blocks", actions=actions, tries=1, seed=1)
    assert found.points > 20 * actions and found.erases >= erases and found.bad == []
    assert not list(tmp_path.iterdir())


def test_blocks_that_are_not_flushed_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(DirectFile, "flush", lambda self: None)
    found = block_crash_points(tmp_path / "blocks", actions=6, tries=1, seed=1)
    assert any("durable blocks are lost" in wrong for wrong in found.bad)


@pytest.mark.full
def test_records_ahead_of_their_blocks_are_found(tmp_path, monkeypatch):
    """After a crash between the two a put of such a key reported the block durable, and wrote nothing."""
    monkeypatch.setattr(SegmentLog, "_flush_blocks", lambda self: None)
    found = block_crash_points(tmp_path / "blocks", actions=6, tries=1, seed=1)
    assert any("put again, reported durable, are lost" in wrong for wrong in found.bad)
