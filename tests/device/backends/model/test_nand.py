"""Page operations on the attend kernel's model, and heads whose pages they have put on NAND."""

from dataclasses import replace

import numpy as np
import pytest

from nearflash.abi.attention.codeword import PageKind, PageTag
from nearflash.abi.attention.descriptor import Mode
from nearflash.abi.attention.page_operation import OperationKind, PageFault, PageOperation
from nearflash.abi.attention.pages import PageEntry
from nearflash.abi.kernel.config import attend_config
from nearflash.device.backends.model.attend import AttendModelDevice
from nearflash.device.drivers.attend import attend
from nearflash.device.drivers.pages import NandError, NandPage, are_marked_bad, erase, operate, program, read
from nearflash.device.memory import SimulatedMemory
from nearflash.device.selftest.attend import place_heads
from nearflash.model.attention.memory.image import head_image
from nearflash.model.attention.memory.placement import MemoryStore, NandStore
from nearflash.model.attention.memory.settings import HeadSettings
from nearflash.model.attention.random_vectors import random_vector
from nearflash.model.attention.vectors import differences
from nearflash.model.nand.codeword import seal

OWNER = PageTag(5, 1, 2)


@pytest.fixture
def device():
    memory = SimulatedMemory(1 << 24)
    with AttendModelDevice(attend_config("attend-tiny"), memory, pages_per_block=4) as opened:
        yield opened


def page(row, index=3, seed=1):
    data = np.random.default_rng(seed).integers(0, 256, (8, 512), np.uint8)
    return NandPage(PageEntry(1, 2, row), OWNER, index, PageKind.TOKEN), seal(OWNER, index, PageKind.TOKEN, data)


def faults(call, *arguments):
    with pytest.raises(NandError) as caught:
        call(*arguments)
    return list(caught.value.faults.values())


def test_pages_are_programmed_once_in_rising_order_and_read_back(device):
    (low, first), (high, second) = page(5), page(6, seed=2)
    program(device, [low, high], [first, second])
    assert [found.tolist() for found in read(device, [high, low])] == [second.tolist(), first.tolist()]
    assert faults(program, device, [low], [second]) == [PageFault.FAILED]
    erase(device, [PageEntry(1, 2, 7)])
    assert faults(read, device, [low]) == [PageFault.UNCORRECTABLE]
    program(device, [low], [second])
    assert device.nand.erases == {(1, 2, 1): 1}


def test_a_page_with_another_tag(device):
    (own, sealed) = page(0)
    program(device, [own], [sealed])
    assert faults(read, device, [replace(own, index=4)]) == [PageFault.MISDIRECTED]
    assert faults(read, device, [replace(own, second=True)]) == [PageFault.MISDIRECTED]
    sealed[3, 100] ^= 1
    assert faults(program, device, [replace(own, entry=PageEntry(1, 2, 1))], [sealed]) == [PageFault.MISDIRECTED]


def test_injected_faults(device):
    (low, first), (high, second) = page(4), page(5, seed=2)
    device.nand.fails = lambda kind, block: kind is OperationKind.PROGRAM and block == (1, 2, 1)
    assert faults(program, device, [low], [first]) == [PageFault.FAILED]
    assert faults(read, device, [low]) == [PageFault.UNCORRECTABLE]
    device.nand.fails = lambda kind, block: kind is OperationKind.ERASE
    program(device, [high], [second])
    assert faults(erase, device, [PageEntry(1, 2, 4)]) == [PageFault.FAILED]
    assert faults(read, device, [high]) == [PageFault.UNCORRECTABLE]


def test_a_block_that_is_read_too_often_is_lost(device):
    (own, sealed) = page(0)
    program(device, [own], [sealed])
    device.nand.read_limit = 2
    for _ in range(2):
        read(device, [own])
    assert faults(read, device, [own]) == [PageFault.UNCORRECTABLE]
    erase(device, [own.entry])
    program(device, [own], [sealed])
    read(device, [own])


def test_marks_of_the_factory(device):
    device.nand.marked = {(1, 2, 1)}
    blocks = [PageEntry(1, 2, row) for row in (0, 4, 8)]
    program(device, [page(0)[0]], [page(0)[1]])
    assert are_marked_bad(device, blocks, 4) == [False, True, False]
    assert faults(erase, device, blocks) == faults(program, device, [page(4)[0]], [page(4)[1]]) == [PageFault.FAILED]


@pytest.mark.parametrize("change", [{"channel": 2}, {"lun": 4}, {"row": 1 << 24}, {"page_bytes": 8192},
                                    {"page_bytes": 2048}, {"index": 1 << 20}], ids=str)  # fmt: skip
def test_a_record_that_breaks_a_rule(device, change):
    good = PageOperation(OperationKind.ERASE, 0, 0, 0, 4096)
    operate(device, [good])
    assert faults(operate, device, [replace(good, **change)]) == [PageFault.DESCRIPTOR]


@pytest.mark.parametrize("interleaved", [False, True])
def test_heads_from_nand_equal_the_model(interleaved):
    settings = HeadSettings(Mode.PAGE | Mode.PROBABILITY, 32, 0.18, score_dims=8, top_k=3, group_tokens=8,
                            block_tokens=32, interleaved=interleaved)  # fmt: skip
    vectors = [random_vector(settings, 101, 2, seed=seed, head=seed) for seed in range(2)]
    store = NandStore(2, 4)
    with AttendModelDevice(attend_config("attend-tiny"), SimulatedMemory(1 << 24)) as device:
        with place_heads(device, vectors, store) as (heads, _):
            sealed = [head_image(c.k, c.v, settings, c.page_tag, MemoryStore(0, 2)) for c in vectors]
            for vector, head, image in zip(vectors, heads, sealed, strict=True):
                fill(device, vector, head, image)
            done = attend(device, heads, repeats=0)
    for vector, one in zip(vectors, done.heads, strict=True):
        assert not differences(vector, one.completion, one.out)


def fill(device, vector, head, image):
    """Program the pages of `image` where the head's tables have them on NAND."""
    places, data = [], []
    sources = {int(p.entry.address): np.frombuffer(p.data, np.uint8).reshape(-1, 528) for p in image.pages}
    for kind, table, source in ((PageKind.TOKEN, head.token_table, image.token_table),
                                (PageKind.INDEX, head.index_table, image.index_table)):  # fmt: skip
        for index, (word, own) in enumerate(zip(table.tolist(), source.tolist(), strict=True)):
            entry, sealed = PageEntry.unpack(word), sources[PageEntry.unpack(own).address]
            if entry.address is None:
                for second in range(len(sealed) // 8):
                    where = replace(entry, lun=entry.lun ^ second)
                    places.append(NandPage(where, vector.page_tag, index, kind, bool(second)))
                    data.append(sealed[8 * second : 8 * second + 8])
    order = sorted(range(len(places)), key=lambda at: places[at].entry.row)
    program(device, [places[at] for at in order], [data[at] for at in order])
