"""Page operations: the bytes of a record, and of a completion."""

import pytest

from nearflash.abi.attention.codeword import PageKind, PageTag
from nearflash.abi.attention.page_operation import (
    OPERATION_BYTES,
    OPERATION_COMPLETION_BYTES,
    OPERATION_FIELDS,
    PAGE_FAULT_ADVICE,
    OperationCompletion,
    OperationKind,
    PageFault,
    PageOperation,
)
from nearflash.abi.errors import CommandError

READ = PageOperation(
    OperationKind.READ, 1, 2, 0x030405, 8192, 0x0A0B0C0D0E08, PageTag(6, 7, 8), 9, PageKind.INDEX, second=True
)


def test_a_record_is_32_bytes_little_endian() -> None:
    assert READ.pack() == bytes.fromhex("03 01 02 0d 05040300 080e0d0c0b0a0000 06000000 0700 0800 09000000 01 01 0000")
    assert len(READ.pack()) == OPERATION_BYTES


def test_the_fields_are_those_of_the_record() -> None:
    word, place, found = int.from_bytes(READ.pack(), "little"), 0, {}
    for name, bits in OPERATION_FIELDS.items():
        found[name] = word >> place & (1 << bits) - 1
        place += bits
    assert found == {
        "kind": 3, "channel": 1, "lun": 2, "page_log2": 13, "row": 0x030405, "address": 0x0A0B0C0D0E08, "sequence": 6,
        "layer": 7, "head": 8, "index": 9, "page_kind": 1, "second": 1,
    }  # fmt: skip


def test_a_page_in_memory_is_its_sealed_codewords() -> None:
    assert READ.sealed_bytes == 16 * 528
    assert PageOperation(OperationKind.ERASE, 0, 0, 0, 4096).sealed_bytes == 0


def test_a_field_that_does_not_fit_is_refused() -> None:
    with pytest.raises(CommandError, match="every field of a page operation must fit its place"):
        PageOperation(OperationKind.ERASE, 256, 0, 0, 4096).pack()


def test_its_text_says_where() -> None:
    assert str(READ) == "read of channel 1, lun 2, row 197637"


def test_completions() -> None:
    ended = OperationCompletion(PageFault.FAILED | PageFault.MEMORY)
    assert ended.pack() == bytes.fromhex("06000000 01000000")
    assert len(ended.pack()) == OPERATION_COMPLETION_BYTES
    assert OperationCompletion.unpack(ended.pack()) == ended
    assert not OperationCompletion.unpack(bytes(8)).ended


def test_every_fault_has_an_advice() -> None:
    assert set(PAGE_FAULT_ADVICE) == set(PageFault)
