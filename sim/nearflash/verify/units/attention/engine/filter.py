"""Requests of the beat filter: all head dimensions, layouts and index formats; a plain model names what is wanted."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from amaranth.hdl import Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from numpy.typing import NDArray

from nearflash.abi.attention.faults import Fault
from nearflash.abi.attention.pages import IndexFormat, IndexLayout, TokenLayout
from nearflash.gateware.attention.engine.beats import TICKETS, ElementBeat, RequestRecord, TicketFault, What
from nearflash.gateware.attention.engine.filter import BeatFilter
from nearflash.gateware.attention.engine.interfaces import ContextRecord, PageHeader, RequestKind
from nearflash.sim.stalls import Stall, StallPattern
from nearflash.sim.verilator.ports import words_from_integers
from nearflash.verify.mutants.target import Target

__all__ = ["TARGET", "ObservedFilter", "vectors"]

_CONTEXTS, _REQUESTS = 64, 160
_CODEWORD_BEATS = 64
_UNITS = 256
"""Tokens of a page (of K or V) that the filter tells apart: nobody asks for what lies behind."""
_Place = dict[str, Any]
"""Fields of a wanted beat, without its ticket and data."""


class ObservedFilter(wiring.Component):
    """BeatFilter for `_CONTEXTS` contexts; payloads and fields of `o` are zero where they mean nothing.

    Contexts are a stream, and pages wait until all are written. `o_fault` is a stream of one item a codeword.
    """

    def __init__(self) -> None:
        self._filter = BeatFilter(_CONTEXTS)
        kept = {name: self._filter.signature.members[name] for name in ("i_page", "i", "o_request", "o")}
        broadcasts = {"i_context": In(stream.Signature(ContextRecord)), "o_fault": Out(stream.Signature(TicketFault))}
        super().__init__(kept | broadcasts)

    def elaborate(self, platform: Any) -> Module:
        """Build the filter, the waits and the gates."""
        m = Module()
        m.submodules.filter = inner = self._filter
        written, free, all_written = Signal(range(_CONTEXTS + 1)), Signal(), Signal()
        m.d.sync += written.eq(written + (self.i_context.valid & ~all_written))
        m.d.comb += [
            all_written.eq(written == _CONTEXTS),
            self.i_context.ready.eq(1),
            inner.i_context.valid.eq(self.i_context.valid),
            inner.i_context.record.eq(self.i_context.payload),
            # Between two writes it names another context, which must keep what it holds.
            inner.i_context.record.context.eq(self.i_context.payload.context ^ (~self.i_context.valid).replicate(6)),
            inner.i_page.payload.eq(self.i_page.payload),
            inner.i_page.valid.eq(self.i_page.valid & all_written),
            self.i_page.ready.eq(inner.i_page.ready & all_written),
            free.eq(self.o_fault.ready | ~self.i.payload.first),
            inner.i.payload.eq(self.i.payload),
            inner.i.valid.eq(self.i.valid & free),
            self.i.ready.eq(inner.i.ready & free),
            self.o_fault.valid.eq(self.i.valid & self.i.ready & self.i.payload.first | inner.o_fault.faults.any()),
            self.o_fault.payload.eq(Mux(self.o_fault.valid, Value.cast(inner.o_fault), 0)),
            self.o_request.valid.eq(inner.o_request.valid),
            self.o_request.payload.eq(Mux(inner.o_request.valid, Value.cast(inner.o_request.payload), 0)),
            inner.o_request.ready.eq(self.o_request.ready),
            self.o.valid.eq(inner.o.valid),
            inner.o.ready.eq(self.o.ready),
        ]
        with m.If(inner.o.valid):
            self._gate(m, inner.o.payload)
        return m

    def _gate(self, m: Module, beat: data.View) -> None:
        out = self.o.payload
        m.d.comb += [out.what.eq(beat.what), out.ticket.eq(beat.ticket), out.gather.eq(beat.gather)]
        with m.If(beat.what != What.END):
            m.d.comb += [out.data.eq(beat.data), out.first.eq(beat.first)]
            with m.If(beat.what != What.AUX):
                m.d.comb += out.row.eq(beat.row)
            with m.If((beat.what == What.AUX) | (beat.what == What.ROW)):
                m.d.comb += out.channel.eq(beat.channel)
            with m.Else():
                m.d.comb += [out.token.eq(beat.token), out.last.eq(beat.last)]


@dataclass(frozen=True)
class _Context:
    page_bytes: int
    index_page_bytes: int
    dim: int
    tokens: int
    interleaved: bool
    block_tokens: int
    form: IndexFormat
    query_base: int
    group: int
    limit_shift: int

    @property
    def token_layout(self) -> TokenLayout:
        return TokenLayout(self.page_bytes, self.dim, self.tokens, self.interleaved)

    @property
    def index_layout(self) -> IndexLayout:
        return IndexLayout(self.index_page_bytes, self.dim, self.block_tokens, self.form)

    def record(self, number: int) -> int:
        index = self.index_layout
        return _pack(ContextRecord, {
            "context": number, "query_base": self.query_base, "dim_rows": self.dim // 4, "group": self.group,
            "group_tokens": self.tokens, "interleaved": self.interleaved, "block_tokens": self.block_tokens,
            "index_format": self.form, "index_rows": index.rows, "row_codewords": index.row_codewords,
            "page_codewords": self.token_layout.page_codewords, "limit_shift": self.limit_shift,
        })  # fmt: skip


@dataclass(frozen=True)
class _Request:
    """`codewords`: by number, the places of the aux beat (INDEX) and of 64 beats, None where nobody wants it.

    `page` is anything for TAIL and GATHER.
    """

    rows: int
    page: int
    codewords: dict[int, list[_Place | None]]


def vectors(rng: np.random.Generator) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Requests of all kinds: each context has another head dimension, 4 to 256, and comes twice or more."""
    contexts = [_context(rng, 4 + 4 * number) for number in rng.permutation(_CONTEXTS).tolist()]
    numbers = [*range(_CONTEXTS)] * 2 + rng.integers(0, _CONTEXTS, _REQUESTS - 2 * _CONTEXTS).tolist()
    pages, records, words, faults, beats = [], [], [], [], []
    for count, number in enumerate(rng.permutation(numbers).tolist()):
        context, ticket = contexts[number], count % TICKETS
        kind = RequestKind(int(rng.integers(3)))
        request = (
            _index(rng, context) if kind is RequestKind.INDEX else _tokens(rng, context, kind is RequestKind.GATHER)
        )
        common = {
            "context": number, "kind": kind, "rows": request.rows, "index": int(rng.integers(1 << 20)),
            "block": int(rng.integers(1 << 13)), "expected": int(rng.integers(1 << 9)),
        }  # fmt: skip
        asked = sum(1 << codeword for codeword in request.codewords)
        pages.append(_pack(PageHeader, common | {"page": request.page, "codewords": asked}))
        records.append(_pack(RequestRecord, common | {
            "ticket": ticket, "query_base": context.query_base, "dim_rows": context.dim // 4, "group": context.group,
            "group_rows": context.tokens // 4, "block_rows": context.block_tokens // 4, "index_format": context.form,
            "limit_shift": context.limit_shift,
        }))  # fmt: skip
        every = {"ticket": ticket, "gather": kind is RequestKind.GATHER}
        for places in request.codewords.values():
            some = rng.integers(0, 1 << 64, len(places), np.uint64)
            uncorrectable, misdirected = rng.random(2) < 0.3
            flags = np.full(len(places), uncorrectable << 2 | misdirected << 3, np.uint32)
            flags[0] |= 1
            flags[-1] |= 2
            words.append(np.column_stack([some.view(np.uint32).reshape(-1, 2), flags]))
            fault = Fault.UNCORRECTABLE if uncorrectable else Fault.MISDIRECTED if misdirected else 0
            faults.append(_pack(TicketFault, {"ticket": ticket, "faults": int(fault)}))
            wanted = zip(some.tolist(), places, strict=True)
            beats += [_pack(ElementBeat, every | place | {"data": word}) for word, place in wanted if place]
        beats.append(_pack(ElementBeat, every | {"what": What.END}))
    writes = [context.record(number) for number, context in enumerate(contexts)]
    inputs = {
        "i_context": _rows(ContextRecord, writes),
        "i_page": _rows(PageHeader, pages),
        "i": np.concatenate(words),
    }
    expected = {"o_request": _rows(RequestRecord, records), "o": _rows(ElementBeat, beats)}
    return inputs, expected | {"o_fault": np.array(faults, np.uint16)}


def _context(rng: np.random.Generator, dim: int) -> _Context:
    """Any context of this head dimension that a descriptor may name; index pages are of a size of their own."""
    page_bytes, interleaved = 1 << int(rng.integers(12, 15)), bool(rng.integers(2))
    most = TokenLayout.capacity(page_bytes, dim, interleaved)
    tokens = most if rng.integers(2) else 4 * int(rng.integers(1, most // 4 + 1))
    block_tokens = 16 * int(rng.integers(1, 65)) if rng.integers(4) else 1024
    form = list(IndexFormat)[rng.integers(3)]
    query_base, group, limit_shift = rng.integers(0, (1 << 12, 1 << 4, 1 << 4)).tolist()
    index_bytes = 1 << int(rng.integers(12, 16))  # its masks of 64 also do for pages of 2^15
    return _Context(
        page_bytes, index_bytes, dim, tokens, interleaved, block_tokens, form, query_base, group, limit_shift
    )


def _some(rng: np.random.Generator, count: int) -> list[int]:
    """At least one of `count` numbers: the last, any one, a few, about half, or all."""
    if rng.integers(5) == 0:
        return [count - 1]
    size = int(rng.choice([1, min(3, count), (count + 1) // 2, count]))
    return sorted(rng.choice(count, size, replace=False).tolist())


def _tokens(rng: np.random.Generator, context: _Context, gather: bool) -> _Request:
    """Tokens of a group, from the codewords that hold them, and at times from some that do not."""
    layout, wanted = context.token_layout, _some(rng, context.tokens)
    places: dict[int, _Place] = {}
    for token in wanted:
        for value in (False, True) if gather else (False,):
            what, span = What.VALUE if value else What.KEY, range(*layout.span(token, value=value), 8)
            for row, byte in enumerate(span):
                ends = {"first": row == 0, "last": row + 1 == len(span)}
                places[byte // 8] = {"what": what, "token": token, "row": row} | ends
    reachable = min(layout.page_codewords, _UNITS * context.dim // 4 // _CODEWORD_BEATS)
    more = {int(rng.integers(layout.pages)) * layout.page_codewords + int(rng.integers(reachable))
            for _ in range(rng.choice([0, 0, 1, 1, 5]))}  # fmt: skip
    numbers = sorted({beat // _CODEWORD_BEATS for beat in places} | more)
    codewords = {
        number: [None, *(places.get(_CODEWORD_BEATS * number + beat) for beat in range(_CODEWORD_BEATS))]
        for number in numbers
    }
    return _Request(sum(1 << token for token in wanted), int(rng.integers(1 << 8)), codewords)


def _index(rng: np.random.Generator, context: _Context) -> _Request:
    """Rows of an embedding page, from their codewords, and at times from those of other rows."""
    layout = context.index_layout
    page = int(rng.integers(layout.pages))
    rows = _some(rng, min(layout.rows, context.dim - page * layout.rows))
    numbers = {row * layout.row_codewords + part for row in rows for part in range(layout.row_codewords)}
    numbers |= {int(rng.integers(layout.rows * layout.row_codewords)) for _ in range(rng.choice([0, 0, 1, 1, 5]))}
    used = context.block_tokens * context.form.bits // 64
    codewords: dict[int, list[_Place | None]] = {}
    for number in sorted(numbers):
        row, part = divmod(number, layout.row_codewords)
        place = {"channel": page * layout.rows + row, "first": part == 0}
        first = _CODEWORD_BEATS * part
        beats = [
            {"what": What.ROW, "row": beat, **place} if row in rows and beat < used else None
            for beat in range(first, first + _CODEWORD_BEATS)
        ]
        codewords[number] = [{"what": What.AUX, **place} if row in rows else None, *beats]
    return _Request(sum(1 << row for row in rows), page, codewords)


def _pack(layout: Any, fields: Mapping[str, Any]) -> int:
    offsets = _OFFSETS[layout]
    return sum(int(getattr(value, "value", value)) << offsets[name] for name, value in fields.items())


def _rows(layout: Any, values: list[int]) -> NDArray[np.uint32]:
    return words_from_integers(values, data.Layout.cast(layout).size)


_OFFSETS = {
    layout: {name: field.offset for name, field in data.Layout.cast(layout)}
    for layout in (ContextRecord, PageHeader, RequestRecord, TicketFault, ElementBeat)
}


#: Pages that come late, so that what is planned ahead runs out, and one soon after another.
_LATE = StallPattern(named={"i_page": Stall(99, burst_cycles=300)})
TARGET = Target(ObservedFilter, vectors, part="filter", stalls=("none", "both", _LATE), batches=6)
