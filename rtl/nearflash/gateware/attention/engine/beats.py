"""Interfaces between the parts of a channel engine: beats of elements, and what is known of their request."""

from amaranth.lib import data, enum

from nearflash.gateware.attention.engine.interfaces import CONTEXT_BITS, FAULT_BITS, SLOT_BITS, RequestKind

__all__ = [
    "TICKETS",
    "ElementBeat",
    "EndedRequest",
    "Op",
    "OpKind",
    "RequestRecord",
    "TicketFault",
    "TicketRecord",
    "What",
]

TICKET_BITS = 2
TICKETS = 1 << TICKET_BITS
"""Requests that may be inside an engine; each holds a ticket, numbered in turn."""


class What(enum.Enum, shape=3):
    """Contents of a beat."""

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
    gather: 1
    """Of a GATHER request."""


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


class OpKind(enum.Enum, shape=3):
    """Work of lanes and memories on an operation; the first five are those of `What`."""

    AUX = 0
    ROW = 1
    KEY = 2
    VALUE = 3
    END = 4
    SUMS = 5
    """Read a row of sums, for a drain."""
    SCORES = 6
    """Read a row of scores, for a drain."""


class Op(data.Struct):
    """One cycle of work: a beat for one set of heads."""

    kind: OpKind
    ticket: TICKET_BITS
    data: 64
    turn: 3
    """Set of query heads: turn·G .. turn·G + G - 1."""
    final: 1
    """The beat's last turn."""
    first: 1
    last: 1
    """KEY, VALUE: first and last beat of the token. AUX: `first`, of the row's first codeword."""
    token: 6
    """SUMS, SCORES: which element of the row."""
    heads: 8
    """Which heads of the set there are: bit k for head turn·G + k < g."""
    lane: 2
    """AUX, ROW: channel mod 4."""
    tail: 1
    """KEY of a TAIL request: channels that are not selected count 0."""
    query: 12
    """Address in the query memory."""
    weight: 10
    """VALUE: place of the token's weights."""
    address: 12
    """VALUE, SUMS: of the sums. SCORES: of the scores. ROW: word of eight tokens in the block."""
    entry: 4
    """AUX, ROW: TicketRecord.entry."""
    form: 2
    """AUX, ROW: IndexFormat."""
    half: 3
    """ROW: which four tokens of the word (fp16, int8); which half of the beat (int8, int4). AUX: which head of the set.
    """
    fresh: 1
    """VALUE, SUMS: the sums have no token yet. AUX, ROW: the scores have no row yet."""
    limit_shift: 4


class TicketRecord(data.Struct):
    """Record of a request while it holds a ticket."""

    request: RequestRecord
    slot: SLOT_BITS
    """GATHER."""
    entry: 4
    """INDEX: place of the block among those with score buffers. TAIL: half of the tail's buffer."""
    initial: 1
    """INDEX: the block's first request."""


class TicketFault(data.Struct):
    """Faults of a request, in this cycle."""

    ticket: TICKET_BITS
    faults: FAULT_BITS


class EndedRequest(data.Struct):
    """A request whose operations have all passed the lanes, with all its faults."""

    record: TicketRecord
    faults: FAULT_BITS
