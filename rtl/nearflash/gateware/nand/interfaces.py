"""Interfaces between NAND channels and those that read pages from them (docs/contracts/attention.md, 2 and 5).

The controller does not know what a page is for. A request carries a `tag` of its reader's shape, which comes back
unchanged ahead of the page's codewords.
"""

from amaranth.hdl import ShapeLike
from amaranth.lib import data

from nearflash.gateware.nand.operation import NUMBER_BITS

__all__ = ["CHANNEL_BITS", "CodewordBeat", "OperationRead", "page_header", "page_request"]

CHANNEL_BITS = 4
"""Of a channel's number."""


def page_request(tag: ShapeLike) -> data.StructLayout:
    """A request for codewords of a page, or of a page on each of a pair of LUNs.

    tag : of the reader's shape. codewords : mask by number, first page's, then second page's; never zero.
    page_log2 : log2 of the codewords of a page, 0 to 5. row, lun : of the first page; the second page lies at the same
    row of LUN `lun` XOR 1.
    """
    return data.StructLayout({"tag": tag, "codewords": 64, "page_log2": 3, "row": 32, "lun": 8})


def page_header(tag: ShapeLike) -> data.StructLayout:
    """Ahead of a page's codewords: the request without what only the controller needs."""
    return data.StructLayout({"tag": tag, "codewords": 64})


class OperationRead(data.Struct):
    """A page operation's request for a whole page of its channel; its page is offered on PagePortSignature.wanted."""

    channel: CHANNEL_BITS
    number: NUMBER_BITS
    """Of the operation."""
    count: 8
    """Codewords of the page: 8, 16 or 32."""
    codewords: 64
    """The same as a mask."""
    row: 32
    lun: 8


class CodewordBeat(data.Struct):
    """A checked codeword: its aux beat (first), then 64 beats of data (the last one with `last`)."""

    data: 64
    first: 1
    last: 1
    uncorrectable: 1
    """Constant over the codeword; so is the next."""
    misdirected: 1
