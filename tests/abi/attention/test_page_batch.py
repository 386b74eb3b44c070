"""A batch of page operations: what it packs, what it refuses, and how completions come back."""

from dataclasses import replace

import pytest

from nearflash.abi.attention.page_batch import PageBatch
from nearflash.abi.attention.page_operation import OperationCompletion, OperationKind, PageFault, PageOperation
from nearflash.abi.errors import AlignmentError, CommandError
from nearflash.abi.kernel.config import CONFIGS
from nearflash.abi.registers import ATTEND

ERASE = PageOperation(OperationKind.ERASE, 0, 1, 2, 4096)
PROGRAM = PageOperation(OperationKind.PROGRAM, 0, 1, 2, 4096, 0x4000)
READ = replace(PROGRAM, kind=OperationKind.READ, address=0x6000)
BATCH = PageBatch((ERASE, PROGRAM, READ), 0x1080, 0x2020)
CONFIG = CONFIGS["attend-tiny"]


def test_records_and_completions_lie_one_behind_the_other() -> None:
    assert BATCH.pack() == ERASE.pack() + PROGRAM.pack() + READ.pack()
    ended = tuple(map(OperationCompletion, (PageFault(0), PageFault.FAILED, PageFault.MISDIRECTED)))
    assert BATCH.completions(b"".join(one.pack() for one in ended) + b"rest") == ended


def test_registers_are_arguments_of_the_kernel() -> None:
    values = {"command": 1, "count": 3, "descriptors_address": 0x1080, "completions_address": 0x2020, "contexts": 1}
    assert BATCH.registers() == values
    assert all(ATTEND[name].access == "rw" for name in values)


def test_ranges_are_those_of_every_page() -> None:
    assert BATCH.reads() == {"operations": (0x1080, 96), "page 1": (0x4000, 8 * 528)}
    assert BATCH.writes() == {"completions": (0x2020, 24), "page 2": (0x6000, 8 * 528)}


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"operations": ()}, CommandError, "a batch must hold 1 to 65535 page operations, not 0"),
        ({"operations": (ERASE,) * 65536}, CommandError, "a batch must hold 1 to 65535 page operations, not 65536"),
        ({"operations_address": 0x1020}, AlignmentError, "must be a multiple of 128 bytes, not 0x1020"),
        ({"completions_address": 0x2008}, AlignmentError, "must be a multiple of 32 bytes, not 0x2008"),
    ],
)
def test_what_the_kernel_would_refuse(changes, error, text) -> None:
    BATCH.check(CONFIG)
    with pytest.raises(error, match=text):
        replace(BATCH, **changes).check(CONFIG)


@pytest.mark.parametrize("name", ["update-tiny", "attend-pynq-z2"])
def test_a_kernel_without_nand_is_refused(name) -> None:
    with pytest.raises(CommandError, match=f"must go to an attend kernel with NAND, not to {name}"):
        BATCH.check(CONFIGS[name])
