"""Models in one folder have files of their own."""

import numpy as np
import pytest

from nearflash.abi.errors import CommandError
from nearflash.serving.tier_store import open_tier_store

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
