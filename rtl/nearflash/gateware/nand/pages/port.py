"""Interface between the page mover and a channel."""

from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.nand.codeword import TaggedBeat
from nearflash.gateware.nand.operation import NUMBER_BITS, NandOperation, NandResult

__all__ = ["PagePortSignature", "PageWanted"]


class PageWanted(data.Struct):
    """A page's data have to move now: the channel's bus is held for them."""

    read: 1
    """It was read: its codewords come on `sealed`. Else those of a program are due."""
    number: NUMBER_BITS
    """Of the operation."""
    codewords: 6
    lun: 8
    """PROGRAM: where it goes."""


PagePortSignature = wiring.Signature(
    {
        "active": Out(1),
        "operation": Out(stream.Signature(NandOperation)),
        "wanted": In(stream.Signature(PageWanted)),
        "program": Out(stream.Signature(64)),
        "sealed": In(stream.Signature(TaggedBeat)),
        "result": In(stream.Signature(NandResult)),
    }
)
"""The mover's side. While `active`, pages that were read go this way and not to the engine; it changes only while
nothing is in flight. Reads come to the channel as page requests made from OperationRead."""
