"""What the parts of a channel engine hand to each other: beats of elements, and what is known of their request."""

from amaranth.lib import data, enum

from nearflash.gateware.attn.interfaces import CONTEXT_BITS, TOKEN_BITS, RequestKind

__all__ = ["TICKETS", "ElementBeat", "RequestRecord", "What"]

TICKET_BITS = 2
TICKETS = 1 << TICKET_BITS
"""Requests that may be inside an engine; each holds a ticket, numbered in turn."""


class What(enum.Enum, shape=3):
    """What a beat holds."""

    AUX = 0
    """Scale and zero of an index row; the rest of the beat means nothing."""
    ROW = 1
    """Elements of one channel and of consecutive tokens: 4 of fp16, 8 of int8, 16 of int4."""
    KEY = 2
    """Four elements of K of one token."""
    VALUE = 3
    """Four elements of V of one token."""
    END = 4
    """Nothing: the request has no more beats."""


class ElementBeat(data.Struct):
    """A beat that somebody wants, with its place."""

    what: What
    ticket: TICKET_BITS
    data: 64
    token: 6
    """KEY, VALUE: token of the group."""
    row: 8
    """KEY, VALUE: channels 4·row .. 4·row + 3. ROW: beat of the index row."""
    channel: 8
    """AUX, ROW: channel of the index row."""
    first: 1
    """KEY, VALUE: first beat of the token. AUX, ROW: of the row's first codeword."""
    last: 1
    """KEY, VALUE: last beat of the token."""


class RequestRecord(data.Struct):
    """A request that begins, with the constants of its context."""

    ticket: TICKET_BITS
    context: CONTEXT_BITS
    kind: RequestKind
    index: 20
    block: 13
    expected: 9
    rows: 64
    query_base: 12
    dim_rows: 7
    group: 4
    group_rows: 5
    """n / 4."""
    block_rows: 9
    """T / 4."""
    index_format: 2
    limit_shift: 4


assert TOKEN_BITS - 2 >= 13  # a block's number fits the row of a score
