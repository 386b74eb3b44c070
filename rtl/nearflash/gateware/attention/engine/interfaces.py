"""Interfaces between the units of the attend kernel (docs/contracts/attention.md draws the units).

Widths are those of the largest build, so that units of all builds fit together; synthesis removes what is constant.
Broadcasts are `valid` with a payload, without back-pressure: they are written before the first request that needs them.
"""

from typing import Any

from amaranth.hdl import Cat, Value, signed
from amaranth.lib import data, enum

from nearflash.abi.attention.fixed_point import PV_BITS, SCORE_BITS
from nearflash.gateware.attention.numerics.product import OPERAND
from nearflash.gateware.nand.interfaces import CHANNEL_BITS

__all__ = [
    "FAULT_BITS",
    "Alpha",
    "ContextPulse",
    "ContextRecord",
    "Done",
    "DrainCommand",
    "FinishCommand",
    "GatherStart",
    "GatherWrite",
    "MaskBeat",
    "PageHeader",
    "PageRequest",
    "Partial",
    "RequestKind",
    "RoutedHeader",
    "RoutedRequest",
    "ScaleWrite",
    "ScoreRow",
    "SelectCommand",
    "header_of",
    "query_write",
]

CONTEXT_BITS = 6
HEAD_BITS = 3
TOKEN_BITS = 18
SLOT_BITS = 6
FAULT_BITS = 10
"""Bits of nearflash.abi.attention.faults.Fault."""


class RequestKind(enum.Enum, shape=2):
    """Purpose of a page request."""

    INDEX = 0
    """Rows of an index page: approximate scores of a block."""
    TAIL = 1
    """K of a KV page group, with q masked to the selected channels: approximate scores."""
    GATHER = 2
    """K and V of a KV page group: exact scores, weights, sums."""
    PAGE = 3
    """All of one page, for a page operation: it reaches no engine."""


class ContextPulse(data.Struct):
    """Something has happened to a context, in this cycle if `valid`."""

    valid: 1
    context: CONTEXT_BITS


class ContextRecord(data.Struct):
    """Broadcast by Prepare when a head takes a context: its constants."""

    context: CONTEXT_BITS
    page_tag: 64
    """sequence, layer << 32, head << 48."""
    query_base: 12
    """Address of its first row in the query memories."""
    dim_rows: 7
    """d / 4."""
    group: 4
    group_tokens: 7
    """n."""
    interleaved: 1
    block_tokens: 11
    """T."""
    index_format: 2
    index_rows: 7
    """m."""
    row_codewords: 3
    page_codewords: 6
    """Codewords of one page."""
    limit_shift: 4
    """ceil(log2 r)."""
    tokens: TOKEN_BITS
    """S."""
    scale: 32
    """fp32: exact score to logit."""
    page_mode: 1
    """An entry of the selection is a KV page group (else a token)."""


def query_write(heads_per_beat: int) -> data.StructLayout:
    """Broadcast by Prepare: one row of the query memories. Row of head h, channels 4i..4i+3: query_base + (h //
    heads_per_beat)·dim_rows + i. Values as multipliers take them."""
    return data.StructLayout(
        {
            "address": 12,
            "values": data.ArrayLayout(data.ArrayLayout(OPERAND, 4), heads_per_beat),
            "selected": 4,
        }
    )


class ScaleWrite(data.Struct):
    """Broadcast by Prepare to the selection: fp32 factor from approximate score to logit of one query head."""

    context: CONTEXT_BITS
    head: HEAD_BITS
    scale: 32


class PageRequest(data.Struct):
    """From a walker to a page source."""

    context: CONTEXT_BITS
    kind: RequestKind
    index: 20
    """Page index of the page tag: b·ceil(d/m) + j, or the KV page group."""
    block: 13
    """INDEX: b."""
    page: 8
    """INDEX: j."""
    expected: 9
    """INDEX: requests of this block, this one included."""
    codewords: 64
    """Codewords to read, by number; for separate pages K's, then V's. Never zero."""
    rows: 64
    """INDEX: rows of the page that are wanted; TAIL, GATHER: tokens of the group that are wanted. Never zero."""
    memory: 1
    address: 48
    """Byte address in memory, or row (32 bits) and unit (8 bits) on NAND."""


class PageHeader(data.Struct):
    """Ahead of a page's beats: the request without its address."""

    context: CONTEXT_BITS
    kind: RequestKind
    index: 20
    block: 13
    page: 8
    expected: 9
    codewords: 64
    rows: 64


def header_of(request: Any) -> Value:
    """The PageHeader of a PageRequest."""
    return Cat(request[name] for name, _ in data.Layout.cast(PageHeader))


class RoutedRequest(data.Struct):
    """A page request to memory, and the channel whose engine gets the page."""

    channel: CHANNEL_BITS
    request: PageRequest


class RoutedHeader(data.Struct):
    """A page header from memory, and the channel whose engine gets it and the page's beats."""

    channel: CHANNEL_BITS
    header: PageHeader


class ScoreRow(data.Struct):
    """Approximate scores of four tokens for one query head: tokens 4·row .. 4·row + 3.

    Order: KV page groups of a request or block ascending; within a group query heads ascending; within a head rows
    ascending. `last` ends a head of a group. Groups of different requests do not interleave.
    """

    context: CONTEXT_BITS
    head: HEAD_BITS
    row: TOKEN_BITS - 2
    scores: data.ArrayLayout(signed(SCORE_BITS), 4)
    valid: 4
    last: 1


class Done(data.Struct):
    """A request (TAIL, GATHER) or a whole block (INDEX) is done: its scores left or its sums are in."""

    context: CONTEXT_BITS
    kind: RequestKind
    faults: FAULT_BITS


class SelectCommand(data.Struct):
    """To the selection, when all scores of a context are in."""

    context: CONTEXT_BITS
    group: 4
    entries: TOKEN_BITS
    tokens: TOKEN_BITS
    budget: TOKEN_BITS
    local_entry: TOKEN_BITS
    """First entry of the local window."""
    probability: 1
    mass: 16
    """0: by count."""


class GatherStart(data.Struct):
    """From the selection, ahead of a context's mask: references of its query heads."""

    context: CONTEXT_BITS
    references: data.ArrayLayout(signed(12), 8)


class GatherWrite(data.Struct):
    """Broadcast by GatherWalker before a head's first GATHER request: its slot of exact sums and its references."""

    context: CONTEXT_BITS
    slot: SLOT_BITS
    references: data.ArrayLayout(signed(12), 8)


class MaskBeat(data.Struct):
    """Entries 4i .. 4i + 3 that are selected, i ascending from 0."""

    mask: 4
    last: 1


class Alpha(data.Struct):
    """From the selection, behind a context's mask: one item a query head, ascending."""

    context: CONTEXT_BITS
    head: HEAD_BITS
    selected: TOKEN_BITS
    numerator: 52
    denominator: 52
    faults: FAULT_BITS


class DrainCommand(data.Struct):
    """From Finish to a channel engine, when no request of the head is in flight: give the slot's sums (Partial items),
    and leave the slot empty for the next head. A slot in which this channel summed nothing gives zeros, and the least
    maximum."""

    slot: SLOT_BITS
    group: 4
    dim_rows: 7


class Partial(data.Struct):
    """A channel's share of a head's sums, when drained: first one item a query head with l (in units of 2^-48) and the
    largest floor of its logits, then all elements of head 0, of head 1, … (l and element by element N)."""

    sum: signed(PV_BITS)
    maximum: signed(12)


class FinishCommand(data.Struct):
    """To Finish, when nothing of a head is in flight any more. Finish responds with the context's number once the
    completion is in memory; then context and slot are free."""

    context: CONTEXT_BITS
    index: 32
    """Of the descriptor, so of the completion."""
    drain: 1
    """The slot holds sums, to be drained whatever the faults are; else all channels have none of this head."""
    slot: SLOT_BITS
    weighed: 1
    """The head's Alpha items have come; else (dense, or faults) there are none: alpha is 1, all entries selected."""
    group: 4
    dim_rows: 7
    v_mean_address: 48
    out_address: 48
    entries: TOKEN_BITS
    pages: 20
    faults: FAULT_BITS
    """Those of Prepare, the walkers, Done and Alpha. Not zero: out is not written."""
