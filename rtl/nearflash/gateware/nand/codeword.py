"""Streams between the units that read and check codewords (docs/contracts/attention.md, 2)."""

from amaranth.hdl import C, Cat, Value
from amaranth.lib import data

from nearflash.abi.attention.codeword import CODEWORD_BYTES, MESSAGE_BYTES

__all__ = ["CONTENT_BEATS", "MESSAGE_BEATS", "TAGGED_BEATS", "ErrorPosition", "PageTag", "SealedTag", "TaggedBeat"]

CONTENT_BEATS = 1 + CODEWORD_BYTES // 8
"""Beats of aux and data."""
MESSAGE_BEATS = -(-MESSAGE_BYTES // 8)
"""Beats of aux, data and CRC; the last one is half a beat."""
TAGGED_BEATS = 2 + MESSAGE_BEATS
"""Beats of page tag, aux, data and CRC."""


class PageTag(data.Struct):
    """Whose page a request reads."""

    page_tag: 64
    """sequence, layer << 32, head << 48."""
    index: 20
    """Page index."""
    kind: 1
    """PageKind."""

    def block(self, number: Value) -> tuple[Value, Value]:
        """The two beats of the page tag for the codeword of this `number`."""
        return self.page_tag, Cat(self.index, C(0, 12), self.kind, C(0, 7), number, C(0, 8 - len(number)), C(0, 16))


class SealedTag(data.Struct):
    """Whose codeword comes next, and its number."""

    page: PageTag
    number: 6


class TaggedBeat(data.Struct):
    """A beat of a codeword that begins with its page tag; the flags are constant over the codeword."""

    data: 64
    corrected: 1
    """It had bit errors."""
    uncorrectable: 1
    """It has bit errors."""


class ErrorPosition(data.Struct):
    """Which bit of a codeword is wrong, or that nobody knows. In ascending order, the last one with `last`."""

    position: 13
    last: 1
    uncorrectable: 1
    """More errors than the code corrects: the only item of its codeword."""
