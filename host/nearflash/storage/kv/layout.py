"""The shape of a KV cache, and how it is cut into pages (docs/contracts/attention.md, 2)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from nearflash.abi.attention.codeword import CODEWORD_BYTES, PageKind
from nearflash.abi.attention.pages import IndexFormat, IndexLayout, TokenLayout
from nearflash.abi.errors import CommandError, StateError
from nearflash.storage.flash.page import describe

__all__ = ["KvLayout", "KvShape", "read_label"]

_FIELD_LIMIT = 1 << 16


@dataclass(frozen=True)
class KvShape:
    """K and V of `layers` layers, `kv_heads` heads of `dim` elements each. Raises CommandError for what cannot be."""

    layers: int
    kv_heads: int
    dim: int

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads"):
            if not 1 <= getattr(self, name) <= _FIELD_LIMIT:
                raise CommandError(f"{name} must be 1 to {_FIELD_LIMIT}, not {getattr(self, name)!r}")
        if self.dim % 4 or not 4 <= self.dim <= 256:
            raise CommandError(f"dim must be a multiple of 4, 4 to 256, not {self.dim!r}")

    @property
    def token_bytes(self) -> int:
        """fp16 K and V of one token, all layers and heads."""
        return 4 * self.layers * self.kv_heads * self.dim


@dataclass(frozen=True)
class KvLayout:
    """KV page groups of n tokens and index blocks of T tokens in pages."""

    group_tokens: int
    """n."""
    interleaved: bool
    """K and V of a token in one page; else K's page, and V after it."""
    block_tokens: int
    """T, a multiple of n."""
    index_format: IndexFormat
    page_bytes: int

    def __post_init__(self) -> None:
        if self.block_tokens % self.group_tokens:
            raise CommandError(f"block_tokens must be a multiple of {self.group_tokens}, not {self.block_tokens!r}")
        object.__setattr__(self, "index_format", IndexFormat(self.index_format))

    @property
    def page_codewords(self) -> int:
        """Codewords of a page."""
        return self.page_bytes // CODEWORD_BYTES

    @property
    def group_pages(self) -> int:
        """Pages of a KV page group."""
        return 1 if self.interleaved else 2

    def steps(self, dim: int) -> tuple[int, int]:
        """Elements of fp16 from a token's K to the next one's in a KV page group, and from a token's K to its V."""
        layout = self.token_layout(dim)
        return layout.span(1, value=False)[0] // 2, layout.span(0, value=True)[0] // 2

    def token_layout(self, dim: int) -> TokenLayout:
        """Layout of the KV page groups. Raises CommandError where they do not fit a page."""
        return TokenLayout(self.page_bytes, dim, self.group_tokens, self.interleaved)

    def index_layout(self, dim: int) -> IndexLayout:
        """Layout of the index pages. Raises CommandError where they do not fit a page."""
        return IndexLayout(self.page_bytes, dim, self.block_tokens, self.index_format)

    def tokens(self, key: np.void, dim: int) -> range:
        """Tokens of which a page holds a part."""
        if key["kind"] == PageKind.TOKEN:
            start, size = int(key["index"]) * self.group_tokens, self.group_tokens
        else:
            start, size = int(key["index"]) // self.index_layout(dim).pages * self.block_tokens, self.block_tokens
        return range(start, start + size)

    def describe(self, key: np.void, dim: int) -> str:
        """A page's key in words, with its tokens."""
        tokens = self.tokens(key, dim)
        return f"{describe(key)}, tokens [{tokens.start}, {tokens.stop})"


def read_label(about: Mapping[str, Any]) -> tuple[KvShape, KvLayout]:
    """Shape and layout as a flash's label (Flash.label) gives them. Raises StateError for another label."""
    try:
        return KvShape(**about["shape"]), KvLayout(**about["layout"])
    except (KeyError, TypeError, ValueError, ArithmeticError, CommandError) as error:
        raise StateError(f"the flash must hold a KV store, not {dict(about)!r}") from error
