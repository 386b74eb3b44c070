"""Page operations of the whole attend kernel on Verilator, what goes wrong with them, and heads after them."""

from dataclasses import replace

import numpy as np
import pytest

from nearflash.abi.attention.codeword import PageKind, PageTag
from nearflash.abi.attention.page_operation import OperationKind, PageFault, PageOperation
from nearflash.abi.attention.pages import IndexFormat, PageEntry
from nearflash.abi.kernel.config import attend_config
from nearflash.device.drivers.attend import attend
from nearflash.device.drivers.pages import NandError, NandPage, erase, operate, program, read
from nearflash.model.attention.random_vectors import random_mode_vector
from nearflash.model.attention.vectors import differences
from nearflash.model.nand.codeword import raw_codewords, seal
from nearflash.sim.verilator.device import VerilatorDevice
from nearflash.sim.verilator.heads import place_heads
from nearflash.sim.verilator.kernel import MemoryModel
from nearflash.storage.flash.bad_blocks import TABLE_BLOCKS
from nearflash.storage.flash.nand import NandFlash
from nearflash.storage.flash.page import PageWrites, page_headers, page_keys

OWNER = PageTag(5, 6, 7)
BLOCK = 768
"""Pages of a block of the part behind attend-tiny."""


@pytest.fixture(scope="module")
def device():
    """The tiny build: two channels with four luns each."""
    with VerilatorDevice(attend_config("attend-tiny"), memory_bytes=1 << 26) as opened:
        yield opened


@pytest.fixture
def blocks(device):
    """New luns, without pages, bad blocks and bit errors; the controllers begin anew with them."""
    for channel in device.kernel.channels:
        model = channel.model
        channel.configure(replace(model, luns=1))
        channel.configure(replace(model, bit_error_rate=0.0))
    device.reset()


def pages(count, *, block=0, seed=1):
    """Names and sealed pages round all luns, two or more to each of the first ones, V's pages among them."""
    names, sealed = [], []
    for index in range(count):
        entry = PageEntry(index % 2, index // 2 % 4, BLOCK * block + index // 8)
        content = np.random.default_rng((seed, index)).integers(0, 256, (8, 520), np.uint8)
        name = NandPage(entry, OWNER, index, PageKind(index % 5 == 0), second=index % 3 == 0)
        names.append(name)
        sealed.append(seal(OWNER, index, name.kind, content[:, 8:], content[:, :8], first=8 * name.second))
    return names, sealed


def stored(device, name):
    """The page's raw codewords on NAND."""
    channel = device.kernel.channels[name.entry.channel]
    return channel.page(name.entry.lun, name.entry.row)[: 8 * 552].reshape(8, 552)


@pytest.mark.parametrize("stall_percent", [0, 50])
def test_pages_are_programmed_and_read_back(device, blocks, stall_percent):
    device.kernel.configure(MemoryModel(stall_percent=stall_percent, seed=3))
    names, sealed = pages(20)
    program(device, names, sealed)
    for name, page in zip(names, sealed, strict=True):
        np.testing.assert_array_equal(stored(device, name), raw_codewords(page, name.entry.row, name.entry.lun))
    found = read(device, names)
    device.kernel.configure(MemoryModel())
    np.testing.assert_array_equal(np.stack(found), np.stack(sealed))


def test_units_work_at_the_same_time(device, blocks):
    """Eight erases take little longer than one."""
    names, sealed = pages(8)
    program(device, names, sealed)
    before = device.kernel.cycles
    erase(device, [name.entry for name in names])
    assert device.kernel.cycles - before < 1.2 * device.identity.config.nand.erase_ns / 10
    assert all((stored(device, name) == 0xFF).all() for name in names)
    assert all(channel.block_erases(lun, 0) == 1 for channel in device.kernel.channels for lun in range(4))


def faults(call, *arguments):
    with pytest.raises(NandError) as caught:
        call(*arguments)
    return {(one.channel, one.lun, one.row): found for one, found in caught.value.faults.items()}, str(caught.value)


def test_a_bad_block_is_told_and_others_are_written(device, blocks):
    device.kernel.channels[1].spoil(2, 1)
    names, sealed = pages(16, block=1)
    found, text = faults(program, device, names, sealed)
    assert found == {(1, 2, BLOCK): PageFault.FAILED, (1, 2, BLOCK + 1): PageFault.FAILED}
    assert text == (
        f"program of channel 1, lun 2, row {BLOCK} must end without fault, not FAILED (and 1 more): "
        "retire the block and write its pages to another one"
    )
    assert faults(erase, device, [names[5].entry, names[0].entry])[0] == {(1, 2, BLOCK): PageFault.FAILED}
    program(device, names[:1], sealed[:1])
    np.testing.assert_array_equal(read(device, names[:1])[0], sealed[0])


@pytest.mark.full
def test_a_flash_on_it_leaves_bad_blocks_out_and_replaces_those_that_fail(device, blocks):
    """The factory's mark and the table of bad blocks are read through the gateware; a failed program costs nothing."""
    channels = device.kernel.channels
    channels[1].mark(2, TABLE_BLOCKS)
    options = {"pages_per_block": BLOCK, "blocks_per_lun": 1, "paired": False, "spare_blocks": 1}
    flash = NandFlash(device, **options)
    assert flash.wear.bad_blocks == 1 and flash.entry(5 * BLOCK).row == BLOCK * (TABLE_BLOCKS + 1)
    keys = page_keys(1, 2, 3, np.arange(6), PageKind.TOKEN)
    aux = np.zeros((6, 8, 8), np.uint8)
    aux[..., 4:] = page_headers(keys, 4096, 16, IndexFormat.FP16)
    written = PageWrites(keys, np.random.default_rng(4).integers(0, 256, (6, 4096), dtype=np.uint8), aux)
    first, rest = (PageWrites(*(part[half] for part in (keys, written.data, aux))) for half in (slice(2), slice(2, 6)))
    flash.program(np.arange(2), first)
    channels[0].fail(0, TABLE_BLOCKS, programs=1)
    flash.program(np.arange(2, 6), rest)
    assert flash.wear.retired == 1 and flash.wear.moved_pages == 6
    np.testing.assert_array_equal(flash.read(np.arange(6), keys).data, written.data)
    again = NandFlash(device, **options)
    assert again.wear.bad_blocks == 2 and again.entry(0) == flash.entry(0)


def test_rows_again_or_out_of_order_fail(device, blocks):
    names, sealed = pages(16)
    program(device, names[8:9], sealed[8:9])
    assert faults(program, device, names[8:9], sealed[8:9])[0] == {(0, 0, 1): PageFault.FAILED}
    assert faults(program, device, names[:1], sealed[:1])[0] == {(0, 0, 0): PageFault.FAILED}
    np.testing.assert_array_equal(read(device, names[8:9])[0], sealed[8])


def test_a_dead_unit_costs_its_own_operations(device, blocks):
    names, sealed = pages(8)
    device.kernel.channels[0].stick(1)
    found, _ = faults(program, device, names, sealed)
    device.kernel.channels[0].stick(1, -1)
    device.reset()
    assert found == {(0, 1, 0): PageFault.TIMEOUT}
    program(device, [replace(names[2], entry=PageEntry(0, 1, BLOCK))], sealed[2:3])


def test_bit_errors_are_corrected_or_told(device, blocks):
    names, sealed = pages(4)
    program(device, names, sealed)
    for rate, expected in ((5e-4, None), (1e-2, PageFault.UNCORRECTABLE)):
        for index, channel in enumerate(device.kernel.channels):
            channel.configure(replace(channel.model, bit_error_rate=rate, seed=index))
        if expected is None:
            np.testing.assert_array_equal(np.stack(read(device, names)), np.stack(sealed))
        else:
            assert set(faults(read, device, names)[0].values()) == {expected}


def test_bad_and_foreign_ones_are_named_and_others_unharmed(device, blocks):
    names, sealed = pages(3)
    program(device, names, sealed)
    wrong = replace(names[1], index=99)
    assert faults(read, device, [names[0], wrong, names[2]])[0] == {(1, 0, 0): PageFault.MISDIRECTED}
    good = PageOperation(OperationKind.ERASE, 1, 0, 0, 4096)
    found, _ = faults(operate, device, [replace(good, lun=4), good, replace(good, channel=2)])
    assert found == {(1, 4, 0): PageFault.DESCRIPTOR, (2, 0, 0): PageFault.DESCRIPTOR}
    assert (stored(device, names[1]) == 0xFF).all()


def test_heads_on_pages_that_the_kernel_wrote_equal_the_model(device, blocks):
    rng = np.random.default_rng(8)
    vectors = [
        random_mode_vector(rng, mode, 64, 2, 200, PageTag(1, 2, head))
        for head, mode in enumerate(("dense", "sparf-page"))
    ]
    with place_heads(device, vectors, written=True) as heads:
        done = attend(device, heads)
    for vector, one in zip(vectors, done.heads, strict=True):
        assert not differences(vector, one.completion, one.out)
    assert done.batches[0].counters["heads_done"] == 2
