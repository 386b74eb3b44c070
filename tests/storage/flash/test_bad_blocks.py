"""The table of bad blocks on NAND: marks found once, versions, faults of its own blocks."""

import pytest

from nearflash.abi.attention.page_operation import OperationKind
from nearflash.abi.errors import CommandError, ReadOnlyError, StateError
from nearflash.abi.kernel.config import attend_config
from nearflash.device.backends.model.attend import AttendModelDevice
from nearflash.storage.flash.bad_blocks import TABLE_BLOCKS, BadBlockTable

CONFIG = attend_config("attend-tiny")
PAGES = 4


@pytest.fixture
def device():
    with AttendModelDevice(CONFIG, pages_per_block=PAGES) as device:
        yield device


def table_of(device, rows=6, first=2, pages=PAGES):
    return BadBlockTable(device, CONFIG, first, pages, rows)


def bad(table):
    return {tuple(place) for place in zip(*(axis.tolist() for axis in table.bad.nonzero()), strict=True)}


def test_marks_are_found_once_and_what_failed_is_kept(device):
    device.nand.marked = {(1, 2, 2 + TABLE_BLOCKS + 5), (0, 0, 2 + TABLE_BLOCKS)}
    table = table_of(device)
    assert bad(table) == {(5, 1, 2), (0, 0, 0)} and table.saved == 1
    for row in range(1, 5):  # more versions than a block has room for
        table.retire([(row, 0, 3)])
    device.nand.marked.clear()  # programmed over since
    again = table_of(device)
    assert bad(again) == bad(table) == {(5, 1, 2), (0, 0, 0), *((row, 0, 3) for row in range(1, 5))}
    assert again.saved == 0


def test_fewer_rows_keep_what_is_known_of_the_others_and_more_are_looked_at(device):
    device.nand.marked = {(1, 0, 2 + TABLE_BLOCKS + row) for row in (2, 7)}
    assert bad(table_of(device, rows=3)) == {(2, 1, 0)}
    table_of(device, rows=1).retire([(0, 0, 1)])
    assert bad(table_of(device, rows=8)) == {(0, 0, 1), (2, 1, 0), (7, 1, 0)}


def test_the_newest_version_stays_whatever_fails_and_ends_in_its_middle(device):
    table = table_of(device)
    table.retire([(1, 0, 0)])

    def cut(kind, _):
        raise InterruptedError

    for calls in range(2 * PAGES):
        device.nand.fails = cut
        with pytest.raises(InterruptedError):
            table_of(device).retire([(2, 0, 0)])
        assert bad(table_of(device)) == {(1, 0, 0), *((3, 0, lun) for lun in range(min(calls, 4)))}
        device.nand.fails = lambda kind, block: False
        table_of(device).retire([(3, 0, min(calls, 3))])


def test_its_own_blocks_fail(device):
    device.nand.marked = {(0, 0, 2)}
    table = table_of(device)
    device.nand.fails = lambda kind, block: block in {(0, 0, 3), (0, 0, 4)} and kind is OperationKind.PROGRAM
    table.retire([(1, 1, 1)])
    table.retire([(2, 1, 1)])
    assert bad(table_of(device)) == {(1, 1, 1), (2, 1, 1)}
    device.nand.fails = lambda kind, block: True
    with pytest.raises(ReadOnlyError, match="of lun 0 of channel 0 must take the table of bad blocks"):
        table.retire([(3, 1, 1)])
    assert bad(table_of(device)) == {(1, 1, 1), (2, 1, 1)}


def test_a_version_must_fit_a_block(device):
    with pytest.raises(CommandError, match="pages_per_block must be at least 5, the table's pages"):
        table_of(device, rows=20_000)


def test_a_table_of_other_blocks_is_refused(device):
    table_of(device)
    with pytest.raises(StateError, match="pages_per_block must be 4, as the NAND's table of bad blocks has it, not 2"):
        table_of(device, first=4, pages=2)
