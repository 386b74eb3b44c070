"""Models in one folder have files of their own."""

import numpy as np
import pytest

from nearflash.abi.errors import CommandError
from nearflash.serving.tier_store import TierSettings, open_tier_store

KEY, BLOCK = b"k" * 32, 8192


def open_tier(folder, **fields):
    return open_tier_store(str(folder), 64 * BLOCK, BLOCK, "a/model", fields, direct=False)


def test_another_layout_is_another_file(tmp_path):
    block = np.arange(BLOCK, dtype=np.uint8)
    with open_tier(tmp_path, dtype="fp16") as one, open_tier(tmp_path, dtype="bf16") as other:
        assert one.put([KEY], [block]) == [True]
        assert (one.contains([KEY]), other.contains([KEY])) == ([True], [False])
    with open_tier(tmp_path, dtype="fp16") as again:
        found = np.empty_like(block)
        assert again.get([KEY], [found]) == [True] and (found == block).all()
    assert len(list(tmp_path.glob("*.blocks"))) == 2


def test_a_capacity_that_is_no_number_is_refused(tmp_path):
    with pytest.raises(CommandError, match="capacity_bytes must be a whole number, not '1GB'"):
        open_tier_store(str(tmp_path), "1GB", BLOCK, "a/model", {})
    assert not list(tmp_path.iterdir())


def test_settings_of_an_engine(tmp_path, caplog):
    given = {"path": str(tmp_path), "capacity_bytes": 64 * BLOCK, "direct": False, "unheard_of": 1}
    settings = TierSettings.read(given)
    assert "nearflash knows no unheard_of: ignored" in caplog.text
    with settings.open(BLOCK, "a/model", {}, 0.5) as half:
        assert sum(path.stat().st_size for path in tmp_path.glob("*.blocks")) <= 32 * BLOCK
        half.put([KEY], [np.zeros(BLOCK, np.uint8)])
    with TierSettings.read(given | {"namespace": "v2"}).open(BLOCK, "a/model", {}) as other:
        assert other.contains([KEY]) == [False]
    with pytest.raises(CommandError, match="the configuration must have capacity_bytes and path"):
        TierSettings.read({})
