"""Interfaces between the units of the attend kernel's control: a prepared head, ends of walks, credits.

index ─► Prepare ─ HeadPlan ─► ContextTable ─┬─ ScanPlan ─► ScanWalker ──┐
                                 ▲    ▲  │   └─ TokenJob ─► TokenWalker ─┴─ RoutedRequest ─► Router ─► channels
                                 │    │  └───── SelectCommand, FinishCommand
                               Done  WalkEnd
"""

from amaranth.hdl import signed
from amaranth.lib import data

from nearflash.gateware.attention.engine.interfaces import (
    CONTEXT_BITS,
    FAULT_BITS,
    SLOT_BITS,
    TOKEN_BITS,
    FinishCommand,
    RequestKind,
    SelectCommand,
)
from nearflash.gateware.nand.interfaces import CHANNEL_BITS

__all__ = ["ADDRESS_BITS", "GROUP_BITS", "BlockCredit", "HeadPlan", "ScanPlan", "TokenPlan", "WalkEnd"]

ADDRESS_BITS = 48
"""Bits of a page table's, an operand's or a page's byte address."""
GROUP_BITS = 16
"""Bits of a number of token groups."""
BLOCK_BITS = 14
"""Bits of a number of embedding blocks."""


class ScanPlan(data.Struct):
    """Input of ScanWalker for a head."""

    context: CONTEXT_BITS
    passes: 4
    """Score buffers that a block takes: passes of the query heads."""
    index_table: ADDRESS_BITS
    blocks: BLOCK_BITS
    index_pages: 8
    """Embedding pages of a block."""
    index_rows: 7
    row_codewords: 3


class TokenPlan(data.Struct):
    """Input of TokenWalker for a head."""

    token_table: ADDRESS_BITS
    tokens: TOKEN_BITS
    groups: GROUP_BITS
    tail_group: GROUP_BITS
    """First token group behind the last whole block; `groups` where there is no tail."""
    tail_tokens: 11
    """Tokens from there on."""
    group_tokens: 7
    dim_rows: 7
    interleaved: 1
    page_codewords: 6
    dense: 1
    page_mode: 1
    fixed: 1
    """The references come from the descriptor."""
    references: data.ArrayLayout(signed(12), 8)


class HeadPlan(data.Struct):
    """A prepared head. With faults only `select.context`, `finish.index` and `finish.faults` mean anything."""

    scan: ScanPlan
    token: TokenPlan
    select: SelectCommand
    finish: FinishCommand


class WalkEnd(data.Struct):
    """A walker has sent all requests of a head."""

    context: CONTEXT_BITS
    kind: RequestKind
    dones: 17
    """Items of Done that will come for them: blocks (INDEX) or requests."""
    requests: 20
    slot: SLOT_BITS
    """GATHER: where the head's sums are."""
    faults: FAULT_BITS


class BlockCredit(data.Struct):
    """A block of a context has left the score buffers of a channel."""

    channel: CHANNEL_BITS
    context: CONTEXT_BITS
