"""Processes that store blocks are killed: nothing that they were told is durable is lost."""

import pytest

from nearflash.bench.storage.block_kills import kill_writers
from nearflash.storage.blocks.segment_log import SegmentLog


def test_no_durable_block_is_lost(tmp_path):
    found = kill_writers(tmp_path / "blocks", kills=1, seed=1)
    assert found.kills == 1 and found.served >= found.durable > 7 and found.bad == []


@pytest.mark.full
def test_lost_blocks_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(SegmentLog, "read_zone", lambda self, segment: self.new_zone(segment))
    assert any("is lost" in wrong for wrong in kill_writers(tmp_path / "blocks", kills=1, seed=1).bad)
