"""Page layouts: where tokens and index rows lie (docs/contracts/attention.md, 2)."""

from dataclasses import dataclass
from enum import IntEnum

from nearflash.abi.attention.codeword import CODEWORD_BYTES
from nearflash.abi.errors import CommandError

__all__ = ["DEVICE_GROUP_TOKENS", "IndexFormat", "IndexLayout", "PageEntry", "TokenLayout"]

_FP16_BYTES = 2
DEVICE_GROUP_TOKENS = 64
"""Most tokens of a KV page group that a device attends to; the host attends to a whole block's."""
_ROWS_MAX, _BLOCK_MAX = 64, 1024


class IndexFormat(IntEnum):
    """Element format of the embedding-indexed copy of K."""

    FP16 = 0
    INT8 = 1
    INT4 = 2

    @property
    def bits(self) -> int:
        """Bits of one element."""
        return (16, 8, 4)[self]


@dataclass(frozen=True)
class TokenLayout:
    """KV page groups: K and V of `tokens` consecutive tokens. Raises CommandError where they do not fit a page."""

    page_bytes: int
    dim: int
    tokens: int
    interleaved: bool

    def __post_init__(self) -> None:
        most = self.capacity(self.page_bytes, self.dim, self.interleaved, _BLOCK_MAX)
        if self.tokens % 4 or not 4 <= self.tokens <= most:
            raise CommandError(f"group tokens must be a multiple of 4, 4 to {most}, not {self.tokens!r}")

    @staticmethod
    def capacity(page_bytes: int, dim: int, interleaved: bool, most: int = DEVICE_GROUP_TOKENS) -> int:
        """Most tokens of a group: a multiple of 4, at most `most`."""
        fit = page_bytes // (dim * _FP16_BYTES * (2 if interleaved else 1))
        return min(most, fit // 4 * 4)

    @property
    def pages(self) -> int:
        """Pages of a group."""
        return 1 if self.interleaved else 2

    @property
    def page_codewords(self) -> int:
        """Codewords of one page."""
        return self.page_bytes // CODEWORD_BYTES

    def span(self, token: int, *, value: bool) -> tuple[int, int]:
        """Byte range of K (or V) of the group's `token`, from the start of the group's first page."""
        size = self.dim * _FP16_BYTES
        start = token * 2 * size + value * size if self.interleaved else token * size + value * self.page_bytes
        return start, start + size

    def codewords(self, token: int) -> set[int]:
        """Numbers of the codewords that hold K or V of the group's `token`."""
        return {
            number
            for value in (False, True)
            for start, end in [self.span(token, value=value)]
            for number in range(start // CODEWORD_BYTES, (end - 1) // CODEWORD_BYTES + 1)
        }


@dataclass(frozen=True)
class IndexLayout:
    """Index pages: m dims of T tokens each. Raises CommandError where they do not fit."""

    page_bytes: int
    dim: int
    block_tokens: int
    format: IndexFormat

    def __post_init__(self) -> None:
        if self.block_tokens % 16 or not 16 <= self.block_tokens <= _BLOCK_MAX:
            raise CommandError(f"block_tokens must be a multiple of 16, 16 to {_BLOCK_MAX}, not {self.block_tokens!r}")
        if self.stride_bytes > self.page_bytes:
            raise CommandError(f"a row of {self.block_tokens} tokens must fit a page of {self.page_bytes} bytes")

    @property
    def stride_bytes(self) -> int:
        """Bytes from row to row: whole codewords."""
        return -(-self.block_tokens * self.format.bits // 8 // CODEWORD_BYTES) * CODEWORD_BYTES

    @property
    def row_codewords(self) -> int:
        """Codewords of one row."""
        return self.stride_bytes // CODEWORD_BYTES

    @property
    def rows(self) -> int:
        """Dims of one page (m)."""
        return min(_ROWS_MAX, self.page_bytes // self.stride_bytes)

    @property
    def pages(self) -> int:
        """Pages of one block."""
        return -(-self.dim // self.rows)


@dataclass(frozen=True)
class PageEntry:
    """Place of a page: in memory at a byte address, or on NAND at (lun, row) of a channel."""

    channel: int
    lun: int = 0
    row: int = 0
    address: int | None = None

    def pack(self) -> int:
        """The 64-bit word of a page table. Raises CommandError for a field that does not fit."""
        if self.address is None:
            where, fits = self.lun << 32 | self.row, self.lun < 1 << 8 and self.row < 1 << 32
        else:
            where, fits = 1 << 63 | self.address, self.address < 1 << 48 and self.address % 8 == 0
        if not fits or not 0 <= self.channel < 1 << 8:
            raise CommandError(f"a page entry must have 8-bit channel and lun, 32-bit row, 48-bit address, not {self}")
        return where | self.channel << 48

    @classmethod
    def unpack(cls, word: int) -> "PageEntry":
        """The entry of a page table's word."""
        channel = word >> 48 & 0xFF
        if word >> 63:
            return cls(channel, address=word & (1 << 48) - 1)
        return cls(channel, word >> 32 & 0xFF, word & 0xFFFF_FFFF)
