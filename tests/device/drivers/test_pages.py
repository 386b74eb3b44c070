"""Page operations from the host: batches, turns, and what is refused or told."""

from dataclasses import replace

import numpy as np
import pytest

from nearflash.abi.attention.codeword import PageKind, PageTag
from nearflash.abi.attention.page_operation import OperationCompletion, OperationKind, PageFault, PageOperation
from nearflash.abi.attention.pages import PageEntry
from nearflash.abi.errors import CommandError, ShapeError
from nearflash.abi.kernel.commands import Completion
from nearflash.abi.kernel.config import attend_config
from nearflash.device.backends.model.update import ModelDevice
from nearflash.device.base import Identity
from nearflash.device.checked import CheckedDevice
from nearflash.device.drivers.pages import NandError, NandPage, erase, operate, program, read
from nearflash.device.memory import SimulatedMemory

CONFIG = attend_config("attend-tiny")
PAGE = NandPage(PageEntry(1, 2, 3), PageTag(4, 5, 6), 7, PageKind.INDEX)


class Echo(CheckedDevice):
    """Gives each read a page of its row's low byte; operations of `faulty` rows fail. Keeps the batches."""

    def __init__(self, faulty=()):
        self.memory, self.batches, self.faulty, self.programmed = SimulatedMemory(1 << 26), [], faulty, {}
        super().__init__(Identity("echo", CONFIG, CONFIG.digest64, 1, 0), self.memory)

    @classmethod
    def open(cls, config):
        return cls()

    def _start(self, command):
        self.batches.append(command)
        address, size = command.reads()["operations"]
        assert self.memory.view(address, size).tobytes() == command.pack()
        for index, one in enumerate(command.operations):
            page = self.memory.view(one.address, one.sealed_bytes)
            if one.kind is OperationKind.READ:
                page[:] = one.row & 0xFF
            self.programmed[one.row] = page.copy()
            fault = PageFault.FAILED if one.row in self.faulty else PageFault(0)
            self.memory.view(command.completions_address + 8 * index, 8)[:] = np.frombuffer(
                OperationCompletion(fault).pack(), np.uint8
            )

    def _finish(self, timeout_s):
        return Completion({})

    def _abort(self):
        pass


def at(lun, row):
    return replace(PAGE, entry=PageEntry(0, lun, row))


def test_units_take_turns_and_each_keeps_its_order():
    device = Echo()
    read(device, [at(0, 1), at(0, 2), at(0, 3), at(1, 4), at(1, 5), at(2, 6)])
    assert [one.row for one in device.batches[0].operations] == [1, 4, 6, 2, 5, 3]


def test_pages_come_back_in_the_order_asked_for():
    found = read(Echo(), [at(0, 1), at(0, 2), at(1, 3)])
    assert [page.shape for page in found] == [(8, 528)] * 3
    assert [int(page[0, 0]) for page in found] == [1, 2, 3]


def test_many_operations_go_in_several_batches_and_leave_no_memory_taken():
    device = Echo()
    erase(device, [PageEntry(0, row % 4, row) for row in range(2500)])
    assert [len(batch.operations) for batch in device.batches] == [1024, 1024, 452]
    device.allocate(1 << 26)


def test_pages_go_down_as_they_are():
    device, sealed = Echo(), [np.full((8, 528), 1, np.uint8), np.full((8, 528), 2, np.uint8)]
    program(device, [at(0, 10), at(0, 11)], sealed)
    assert [device.programmed[10 + n].tobytes() == page.tobytes() for n, page in enumerate(sealed)] == [True] * 2
    one = device.batches[0].operations[1]
    assert (one.page_tag, one.index, one.page_kind, one.second) == (PAGE.page_tag, 7, PageKind.INDEX, False)


def test_an_error_names_the_first_place_and_keeps_all_faults():
    with pytest.raises(NandError) as caught:
        read(Echo(faulty=(2, 3)), [at(0, 1), at(1, 2), at(1, 3)])
    assert str(caught.value) == (
        "read of channel 0, lun 1, row 2 must end without fault, not FAILED (and 1 more): "
        "retire the block and write its pages to another one"
    )
    assert [one.row for one in caught.value.faults] == [2, 3]


@pytest.mark.parametrize("shape", [(8, 512), (7, 528), (528,)])
def test_pages_of_another_shape(shape):
    with pytest.raises(ShapeError, match=r"a sealed page must have the shape \(8, 16 or 32, 528\), not "):
        program(Echo(), [PAGE], [np.zeros(shape, np.uint8)])


def test_a_program_without_its_page():
    with pytest.raises(ShapeError, match="program of channel 0, lun 0, row 0 must have 4224 bytes of sealed page"):
        operate(Echo(), [PageOperation(OperationKind.PROGRAM, 0, 0, 0, 4096)])


def test_an_entry_in_memory():
    with pytest.raises(CommandError, match="a page on NAND must have a lun and a row, not PageEntry"):
        replace(PAGE, entry=PageEntry(0, address=64))


def test_another_kernel():
    with pytest.raises(CommandError, match="page operations must go to an attend kernel with NAND, not to model:upd"):
        erase(ModelDevice.open("update-tiny"), [PAGE.entry])
