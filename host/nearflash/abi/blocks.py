"""Sizes in headers of tensors that are packed in blocks: coded weights (abi.coded), rANS-coded bytes (abi.rans)."""

from typing import ClassVar

from nearflash.abi.bitmap import bitmap_error
from nearflash.abi.errors import ShapeError
from nearflash.abi.topk import StreamFault

__all__ = ["BlockSizes", "check_stated_sizes"]

_MOST = 1 << 48
"""Elements of a tensor, at most."""


class BlockSizes:
    """Sizes of a header, a dataclass with these fields."""

    what: ClassVar[str]

    elements: int
    """Of the tensor."""
    block_elements: int
    group_blocks: int
    """Blocks that are checked together."""

    def check_sizes(self) -> None:
        """Raise ShapeError for sizes that cannot be."""
        if not (0 < self.elements <= _MOST and 0 < self.block_elements < 1 << 32 and 0 < self.group_blocks < 1 << 32):
            sizes = f"{self.elements}, {self.block_elements} and {self.group_blocks}"
            raise ShapeError(f"elements, block_elements and group_blocks must be 1 at least, not {sizes}")

    @property
    def blocks(self) -> int:
        """Blocks; the last one may have fewer elements."""
        return -(-self.elements // self.block_elements)

    @property
    def groups(self) -> int:
        """Groups of blocks; the last one may have fewer."""
        return -(-self.blocks // self.group_blocks)


def check_stated_sizes(
    elements: int, block_elements: int, group_blocks: int, stated_bytes: int, stream_bytes: int, what: str, *,
    form: str = "", is_known: bool = True,
) -> None:  # fmt: skip
    """Raise StreamError where a header of a stream of `stream_bytes` bytes states what cannot be.

    form: what else it states, for the error; is_known: whether that can be.
    """
    sizes = f"{elements} elements, {block_elements} a block, {group_blocks} blocks a group"
    if not (is_known and block_elements and group_blocks):
        raise bitmap_error(StreamFault.HEADER, form + sizes, what)
    if not 0 < elements <= _MOST or elements > 8 * stream_bytes:
        raise bitmap_error(StreamFault.LENGTH, f"{stream_bytes} bytes for {sizes}", what)
    if stated_bytes != stream_bytes:
        raise bitmap_error(StreamFault.LENGTH, f"{stream_bytes} bytes where {stated_bytes} are stated", what)
