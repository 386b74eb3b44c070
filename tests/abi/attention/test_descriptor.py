from dataclasses import replace

import pytest

from nearflash.abi.attention.codeword import PageTag
from nearflash.abi.attention.descriptor import AttendDescriptor, Mode
from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.kernel.config import attend_config

#: A head a beat, 4 contexts, 2 slots, 512 query rows, 8 score blocks, 8192 score entries, 4096 keys.
BUILD = replace(attend_config("attend-pynq-z2"), query_rows=512)
HEAD = AttendDescriptor(
    Mode.PAGE, PageTag(0, 0, 0), 64, 1000, 2, 8, 4, 1, 16, False, 256, IndexFormat.FP16, 4096, 0.2, 0, 0, 0, 0, 0
)
DENSE = Mode.DENSE | Mode.REFERENCE


@pytest.mark.parametrize(
    ("changes", "contexts", "fits"),
    [
        ({"dim": 256}, 4, True),  # 128 rows of a context's 128
        ({"dim": 256, "group": 3}, 4, False),
        ({"dim": 256, "group": 3}, 2, True),  # 192 of 256
        ({"dim": 256, "group": 5}, 1, False),  # 320 of the 256 of the gather slots
        ({"dim": 4, "group": 8}, 1, True),  # 8 passes
        ({"mode": Mode(0), "tokens": 1024}, 4, True),  # 2,048 score entries
        ({"mode": Mode(0), "tokens": 1025}, 4, False),
        ({"mode": Mode(0), "tokens": 4096}, 1, True),
        ({"mode": Mode(0), "tokens": 4097, "group": 1}, 1, False),  # keys
        ({"tokens": 16 * 1024}, 4, True),
        ({"tokens": 16 * 1024 + 1}, 4, False),
        ({"mode": DENSE, "tokens": 1 << 17}, 4, True),
    ],
)
def test_room_of_a_build(changes, contexts, fits):
    assert replace(HEAD, **changes).fits(BUILD, contexts) is fits


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({"mode": Mode(0), "tokens": 4096}, True),  # 8,192 score entries
        ({"mode": Mode(0), "tokens": 2728, "group": 3}, True),
        ({"mode": Mode(0), "tokens": 2729, "group": 3}, False),  # 683 lines for each query head, of 2,048 lines
    ],
)
def test_heads_that_take_lines_have_the_whole_store_whatever_the_contexts(changes, fits):
    build = replace(BUILD, mask_beats=256)
    assert [replace(HEAD, **changes).fits(build, contexts) for contexts in (1, 4)] == [fits, fits]


def test_passes_need_score_blocks_unless_dense():
    narrow, head = replace(BUILD, score_blocks=4), replace(HEAD, dim=4, group=5)
    assert not head.fits(narrow, 4)
    assert replace(head, mode=DENSE).fits(narrow, 4) and replace(head, group=4).fits(narrow, 4)
