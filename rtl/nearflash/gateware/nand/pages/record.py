"""Records of page operations: the layout, and the rules that a record keeps."""

from amaranth.hdl import Cat, Const, Value
from amaranth.lib import data

from nearflash.abi.attention.page_operation import OPERATION_BYTES, OPERATION_FIELDS, ROW_BITS, OperationKind
from nearflash.abi.kernel.config import AttendConfig

__all__ = ["OPERATION", "codewords_of", "is_legal"]

_PAGE_LOG2_LEAST = 12
_INDEX_BITS, _ADDRESS_BITS = 20, 48

OPERATION = data.StructLayout(OPERATION_FIELDS | {"reserved": 8 * OPERATION_BYTES - sum(OPERATION_FIELDS.values())})
"""A record (nearflash.abi.attention.page_operation.PageOperation), by field name."""


def codewords_of(record: data.View) -> Value:
    """Codewords of the record's page: 8, 16 or 32."""
    return Cat(Const(0, 3), (record.page_log2 == _PAGE_LOG2_LEAST + size for size in range(3)))


def is_legal(record: data.View, config: AttendConfig) -> Value:
    """Whether the record keeps the rules of docs/contracts/attention.md, 5."""
    sizes = range(_PAGE_LOG2_LEAST, config.page_bytes.bit_length())
    rules = (
        Cat(record.kind == kind for kind in OperationKind).any(),
        record.channel < config.channels,
        record.lun < config.luns,
        Cat(record.page_log2 == size for size in sizes).any(),
        ~record.row[ROW_BITS:].any(),
        ~record.address[:3].any() & ~record.address[_ADDRESS_BITS:].any(),
        ~record.index[_INDEX_BITS:].any(),
        ~record.page_kind[1:].any() & ~record.second[1:].any(),
    )
    return Cat(rules).all()
