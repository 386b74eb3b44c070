"""How pages are numbered."""

import numpy as np
import pytest

from nearflash.abi.errors import CommandError
from nearflash.storage.flash.geometry import FlashGeometry


@pytest.mark.parametrize(
    "field, value, rule",
    [
        ("page_bytes", 2048, "a power of two, 4096 to 65536"),
        ("page_bytes", 6144, "a power of two, 4096 to 65536"),
        ("pages_per_block", 0, "at least 1"),
        ("channels", 0, "1 to 256"),
        ("luns", 257, "1 to 256"),
        ("blocks", 6, r"a positive multiple of channels times luns \(4\)"),
    ],
)
def test_rules(field, value, rule):
    fields = {"page_bytes": 4096, "pages_per_block": 8, "channels": 2, "luns": 2, "blocks": 8}
    with pytest.raises(CommandError, match=f"{field} must be {rule}, not {value}"):
        FlashGeometry(**fields | {field: value})


def test_runs_end_with_their_block():
    geometry = FlashGeometry(4096, 8, 1, 1, 4)
    pages = np.array([3, 4, 5, 6, 7, 8, 9, 11, 11, 10])
    assert [pages[run].tolist() for run in geometry.runs(pages)] == [[3, 4, 5, 6, 7], [8, 9], [11], [11], [10]]
    assert geometry.runs(pages[:0]) == []
