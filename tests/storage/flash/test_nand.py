"""Flash on NAND: pages lie where the kernel's walkers look for them; faults are named."""

import numpy as np
import pytest

from nearflash.abi.attention.codeword import PageKind
from nearflash.abi.attention.page_operation import OperationKind
from nearflash.abi.attention.pages import IndexFormat, PageEntry
from nearflash.abi.errors import CommandError, PageError, ReadOnlyError, StateError
from nearflash.abi.kernel.config import attend_config
from nearflash.device import open_device
from nearflash.device.backends.model.attend import AttendModelDevice
from nearflash.device.memory import SimulatedMemory
from nearflash.storage.flash.bad_blocks import TABLE_BLOCKS
from nearflash.storage.flash.nand import NandFlash
from nearflash.storage.flash.page import PageWrites, page_headers, page_keys

ROWS = 4


@pytest.fixture
def device():
    with AttendModelDevice(attend_config("attend-tiny"), SimulatedMemory(1 << 24), pages_per_block=ROWS) as device:
        yield device


def flash_of(device, **keywords):
    return NandFlash(device, **{"pages_per_block": ROWS, "blocks_per_lun": 3, "paired": False} | keywords)


def batch(indices, first=0, seed=1):
    keys = page_keys(3, 1, 2, np.asarray(indices), PageKind.TOKEN, first)
    aux = np.zeros((len(keys), 8, 8), np.uint8)
    aux[..., 4:] = page_headers(keys, 4096, 16, IndexFormat.FP16)
    return PageWrites(keys, np.random.default_rng(seed).integers(0, 256, (len(keys), 4096), dtype=np.uint8), aux)


def test_pages_come_back(device):
    flash, written = flash_of(device), batch(range(6))
    pages = np.array([0, 1, 2, 20, 9, 21])
    flash.program(pages, written)
    asked = np.array([3, 0, 5, 5, 1])
    read = flash.read(pages[asked], written.keys[asked])
    assert np.array_equal(read.data, written.data[asked]) and np.array_equal(read.aux, written.aux[asked])
    assert flash.read(pages[:0], written.keys[:0]).data.shape == (0, 4096)


def test_where_pages_lie(device):
    flash = flash_of(device, first_block=5)
    assert flash.geometry.lun_queues == 8 and flash.geometry.blocks == 24
    assert flash.entry(0) == PageEntry(0, 0, 20)
    assert flash.entry(11 * ROWS + 3) == PageEntry(1, 1, 20 + ROWS + 3)
    paired = flash_of(device, paired=True)
    assert paired.geometry.lun_queues == 4 and paired.geometry.pages_per_block == 2 * ROWS
    assert paired.entry(3 * 2 * ROWS + 4) == PageEntry(1, 2, 2)
    assert paired.entry(3 * 2 * ROWS + 5) == PageEntry(1, 3, 2)


def test_blocks_are_erased_before_their_first_use_and_on_demand(device):
    flash = flash_of(device, paired=True)
    flash.program(np.array([0, 1]), batch([0, 0], first=[0, 8]))
    assert device.nand.erases == {(0, 0, 0): 1, (0, 1, 0): 1}
    flash.erase(0)
    with pytest.raises(PageError, match="token page 0 is erased"):
        flash.read(np.array([0]), batch([0]).keys)
    flash.program(np.array([0, 1]), batch([1, 1], first=[0, 8]))
    assert device.nand.erases == {(0, 0, 0): 2, (0, 1, 0): 2}
    with pytest.raises(StateError, match="rising order"):
        flash.program(np.array([0]), batch([1]))
    flash_of(device, first_block=3, erased=True).program(np.array([0]), batch([1]))
    assert len(device.nand.erases) == 2


def test_faults_are_named(device):
    flash, written = flash_of(device), batch(range(3))
    flash.program(np.arange(3), written)
    with pytest.raises(PageError, match=r"sequence 3, layer 1, head 2, token page 0 is another's, at page 2"):
        flash.read(np.array([2]), written.keys[:1])
    device.nand.page(0, 0, 1)[:] ^= 0xA5
    with pytest.raises(PageError, match=r"token page 1 is .*, at page 1 of the flash") as caught:
        flash.read(np.arange(3), written.keys)
    assert [page for page, _ in caught.value.pages] == [1]
    other = flash_of(device, erased=True)
    with pytest.raises(ReadOnlyError, match="lun 0 of channel 0 must have a spare for a block that failed"):
        other.program(np.array([0]), batch([0]))


def test_devices_without_nand_are_refused():
    with open_device("host:update-tiny") as device, pytest.raises(CommandError, match="attend kernel with NAND"):
        flash_of(device)


def failing(device, *programs, erases=()):
    """The programs and erases of these counts fail, from now on."""
    counts = {OperationKind.PROGRAM: 0, OperationKind.ERASE: 0}

    def fails(kind, _):
        counts[kind] += 1
        return counts[kind] in (programs if kind is OperationKind.PROGRAM else erases)

    device.nand.fails = fails


@pytest.mark.parametrize("paired", [False, True])
def test_a_failed_program_moves_the_block(device, paired):
    flash = flash_of(device, paired=paired, spare_blocks=2)
    first = [0, 8] if paired else [0, 0]
    pages = np.arange(2)
    early, late = batch([0, 0 if paired else 1], first), batch([1, 1] if paired else [2, 3], first, seed=2)
    flash.program(pages, early)
    before = flash.entries(pages)
    failing(device, 2)
    flash.program(pages + 2, late)
    assert flash.wear.retired == flash.wear.bad_blocks == 1 and flash.wear.moved_pages == 4
    assert not set(flash.entries(pages).tolist()) & set(before.tolist())
    for numbers, written in ((pages, early), (pages + 2, late)):
        assert np.array_equal(flash.read(numbers, written.keys).data, written.data)
    again = flash_of(device, paired=paired, spare_blocks=2)
    assert again.wear.bad_blocks == 1 and again.entry(0).row != PageEntry.unpack(int(before[0])).row


def test_spares_fail_too_and_so_do_erases(device):
    flash, written = flash_of(device, spare_blocks=3), batch(range(3))
    failing(device, 1, 5, erases=(1,))  # the first erase; the block in its place; the table's are not counted alike
    flash.program(np.arange(3), written)
    assert np.array_equal(flash.read(np.arange(3), written.keys).data, written.data)
    assert flash.wear.retired >= 2 and flash.wear.spare_blocks == 3 - flash.wear.retired


def test_factory_marks_are_left_out(device):
    device.nand.marked = {(0, 0, TABLE_BLOCKS), (1, 3, TABLE_BLOCKS + 1)}
    flash = flash_of(device, spare_blocks=2, paired=True)
    assert flash.wear.bad_blocks == 2 and flash.wear.spare_blocks == 1
    assert flash.entry(0).row == (TABLE_BLOCKS + 1) * ROWS
    for block in range(flash.geometry.blocks):
        page = block * flash.geometry.pages_per_block
        flash.program(np.array([page, page + 1]), batch([block] * 2, first=[0, 8]))
    assert not set(device.nand.erases) & device.nand.marked


def test_without_a_spare_it_is_read_only_and_all_is_read(device):
    flash, written = flash_of(device, spare_blocks=1), batch(range(4))
    flash.program(np.arange(3), batch(range(3)))
    device.nand.fails = lambda kind, block: block[:2] == (0, 0) and block[2] >= TABLE_BLOCKS
    with pytest.raises(ReadOnlyError, match="nothing more is written"):
        flash.program(np.arange(3, 4), batch([3]))
    device.nand.fails = lambda kind, block: False
    with pytest.raises(ReadOnlyError):
        flash.program(np.array([4]), batch([4]))
    with pytest.raises(ReadOnlyError):
        flash.erase(1)
    assert np.array_equal(flash.read(np.arange(3), written.keys[:3]).data, batch(range(3)).data)


def test_a_table_that_cannot_be_written_ends_it_too(device):
    flash, written = flash_of(device, spare_blocks=2), batch(range(3))
    flash.program(np.arange(2), batch(range(2)))
    device.nand.fails = lambda kind, block: block == (0, 0, TABLE_BLOCKS) or block[2] < TABLE_BLOCKS
    for _ in range(2):
        with pytest.raises(ReadOnlyError, match="must take the table of bad blocks"):
            flash.program(np.array([2]), batch([2]))
    assert np.array_equal(flash.read(np.arange(2), written.keys[:2]).data, batch(range(2)).data)


def test_a_page_that_is_damaged_does_not_hold_the_others(device):
    flash, written = flash_of(device, spare_blocks=1), batch(range(3))
    flash.program(np.arange(3), written)
    device.nand.page(0, 0, flash.entry(1).row)[:] ^= 0xA5
    failing(device, 1)
    flash.program(np.array([3]), batch([3], seed=2))
    assert np.array_equal(flash.read(np.array([0, 2]), written.keys[[0, 2]]).data, written.data[[0, 2]])
    with pytest.raises(PageError, match="token page 1 is damaged"):
        flash.read(np.array([1]), written.keys[1:2])
