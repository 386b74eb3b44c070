"""Descriptors: what the attend kernel reads for one head, and the completion that it writes back.

A batch is an array of descriptors of 128 bytes; completion i belongs to descriptor i. Little endian, as packed here.
"""

import struct
from dataclasses import dataclass, field
from enum import IntFlag
from typing import ClassVar

from nearflash.abi.attention.codeword import PageTag
from nearflash.abi.attention.faults import Fault
from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.errors import CommandError
from nearflash.abi.formats import fp32_bits
from nearflash.abi.kernel.config import AttendConfig

__all__ = ["COMPLETION_BYTES", "DESCRIPTOR_BYTES", "DESCRIPTOR_FIELDS", "AttendDescriptor", "HeadCompletion", "Mode"]

DESCRIPTOR_BYTES = 128
COMPLETION_BYTES = 32
_GROUP_MAX = 8
_FIELDS = {
    "mode": "B", "group": "B", "index_format": "B", "interleaved": "B", "dim": "H", "score_dims": "H",
    "tokens": "I", "top_k": "I", "local_window": "I", "group_tokens": "H", "block_tokens": "H",
    "page_log2": "B", "reserved": "x", "top_p": "H", "scale": "I", "sequence": "I", "layer": "H", "head": "H",
    "q_address": "Q", "v_mean_address": "Q", "out_address": "Q", "index_table_address": "Q", "token_table_address": "Q",
    **{f"reference_{head}": "h" for head in range(_GROUP_MAX)},
}  # fmt: skip

DESCRIPTOR_FIELDS: dict[str, tuple[int, int]] = {
    name: (struct.calcsize("<" + "".join(_FIELDS.values())[:place]), struct.calcsize("<" + code))
    for place, (name, code) in enumerate(_FIELDS.items())
}
"""Where each field of a descriptor lies: (first byte, bytes). What is not named is reserved: written as 0, ignored."""


class Mode(IntFlag):
    """How tokens are chosen; the sum of what applies."""

    DENSE = 1 << 0
    """All tokens: no scan, no selection; needs REFERENCE."""
    PAGE = 1 << 1
    """Select whole KV page groups (else single tokens, with the fine filter)."""
    PROBABILITY = 1 << 2
    """Rank by probability summed over the group (else by logits summed over the group)."""
    REFERENCE = 1 << 3
    """Take the gather's reference from the descriptor (else from the scan)."""


@dataclass(frozen=True)
class AttendDescriptor:
    """One head: decode attention of `group` query heads over one KV head.

    Addresses are device byte addresses, multiples of 8: q fp16 (group, dim); v_mean fp32 (dim); out fp16 (group, dim),
    written only if nothing failed; index_table and token_table arrays of 64-bit page entries, by page index.
    """

    FORMAT: ClassVar[struct.Struct] = struct.Struct("<" + "".join(_FIELDS.values()) + "32x")

    mode: Mode
    page_tag: PageTag
    dim: int
    tokens: int
    """S, the current token included."""
    group: int
    """g, query heads."""
    score_dims: int
    """r, embedding dimensions of the approximate score; 0 for dense."""
    top_k: int
    """k: tokens, or pages in page selection; with `top_p`, the cap."""
    local_window: int
    """l: the last tokens, always selected."""
    group_tokens: int
    """n, tokens of a KV page group."""
    interleaved: bool
    block_tokens: int
    """T, tokens of an index block."""
    index_format: IndexFormat
    page_bytes: int
    scale: float
    """log2(e) times the softmax scaling."""
    q_address: int
    v_mean_address: int
    out_address: int
    index_table_address: int
    token_table_address: int
    top_p: int = 0
    """Probability mass to select, in 2^-16; 0: by count. Needs PROBABILITY."""
    reference: tuple[int, ...] = field(default=())
    """With REFERENCE: floor of the largest expected base-2 logit, by query head."""

    def pack(self) -> bytes:
        """The 128 bytes that the kernel reads. Raises CommandError for a field that does not fit its place."""
        reference = (*self.reference, *([0] * (_GROUP_MAX - len(self.reference))))
        try:
            return self.FORMAT.pack(
                self.mode, self.group, self.index_format, self.interleaved,
                self.dim, self.score_dims, self.tokens, self.top_k, self.local_window,
                self.group_tokens, self.block_tokens, self.page_bytes.bit_length() - 1, self.top_p,
                fp32_bits(self.scale), self.page_tag.sequence, self.page_tag.layer, self.page_tag.head,
                self.q_address, self.v_mean_address, self.out_address,
                self.index_table_address, self.token_table_address, *reference,
            )  # fmt: skip
        except struct.error as error:
            raise CommandError(f"every field of a descriptor must fit its place: {error}") from None

    @property
    def _entries(self) -> int:
        return -(-self.tokens // max(self.group_tokens, 1)) if self.mode & Mode.PAGE else self.tokens

    @property
    def _stored(self) -> int:
        """Entries of all query heads, each in whole lines of four."""
        return -(-self._entries // 4) * 4 * self.group

    def overfills(self, config: AttendConfig, contexts: int) -> bool:
        """Whether the kernel would take the head though it does not fit: builds without `mask_beats` count entries, not
        the lines of four in which they store them, so that its last line may be another head's."""
        counts = not config.mask_beats and not self.mode & Mode.DENSE
        return counts and self._entries * self.group <= config.score_entries // contexts < self._stored

    def fits(self, config: AttendConfig, contexts: int) -> bool:
        """Whether the build has room for the head as one of `contexts` in flight (docs/contracts/attention.md, 3)."""
        passes = -(-self.group // config.heads_per_beat)
        rows = passes * self.dim // 4
        slots = config.gather_slots * config.query_rows // config.contexts
        room = config.score_entries if config.mask_beats else config.score_entries // contexts
        scored = passes <= config.score_blocks and self._entries <= config.selector_keys and self._stored <= room
        return rows <= min(config.query_rows // contexts, slots) and (bool(self.mode & Mode.DENSE) or scored)


@dataclass(frozen=True)
class HeadCompletion:
    """How one head ended."""

    FORMAT: ClassVar[struct.Struct] = struct.Struct("<IIII8h")

    faults: Fault
    selected: int
    """Entries selected: tokens, or pages in page selection."""
    entries: int
    """Entries there were."""
    pages: int
    """Page requests issued, index and token pages together."""
    maximum: tuple[int, ...]
    """Floor of the largest base-2 logit of the selected tokens, by query head (-32768 where there was none)."""

    @classmethod
    def unpack(cls, record: bytes) -> "HeadCompletion":
        """The completion in a record of 32 bytes."""
        faults, selected, entries, pages, *maximum = cls.FORMAT.unpack(record)
        return cls(Fault(faults), selected, entries, pages, tuple(maximum))

    def pack(self) -> bytes:
        """The record of 32 bytes."""
        maximum = (*self.maximum, *([-32768] * (_GROUP_MAX - len(self.maximum))))
        return self.FORMAT.pack(self.faults, self.selected, self.entries, self.pages, *maximum)
