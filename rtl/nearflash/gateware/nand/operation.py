"""Operations that change what a lun stores, and how they ended."""

from amaranth.lib import data

__all__ = ["NUMBER_BITS", "NandOperation", "NandResult"]

NUMBER_BITS = 16
"""Of an operation's number."""


class NandOperation(data.Struct):
    """A page to program, or a block to erase."""

    erase: 1
    lun: 8
    row: 32
    """Of the page, or of any page of the block."""
    codewords: 6
    """PROGRAM: raw codewords to come on `program`, at least 1, from column 0 on."""
    number: NUMBER_BITS
    """Given back with the result."""


class NandResult(data.Struct):
    """How an operation ended."""

    erase: 1
    lun: 8
    number: NUMBER_BITS
    failed: 1
    """The lun says so: the block is bad."""
    timeout: 1
    """The lun never became ready."""
