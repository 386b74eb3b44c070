"""EntryAddress: where the entries of a row of scores lie in the store.

    entry = row (token selection: four entries, one line)  or  row / (n / 4) (page selection)
    line = context's first line + (entry / 4) · group + head

A context's first line is that of its share of the store, or, in builds whose heads take lines, what `i_base` says.

Timing: latency LATENCY cycles, `page` after one; one row a cycle, free-running.
Numerics: the quotient is floor(row · ceil(2^20 / rows) / 2^20), exact for rows below 2^16 and 1 to 16 rows a group.
"""

from typing import Any

from amaranth import Array, C, Module, Mux
from amaranth.lib import data, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.gateware.attention.engine.interfaces import CONTEXT_BITS, HEAD_BITS, TOKEN_BITS, ContextRecord
from nearflash.gateware.attention.select.entry import base_write, context_base, read_base
from nearflash.gateware.fp.pipeline import delay, register

__all__ = ["EntryAddress"]

_GROUP_ROWS = 16
_QUOTIENT_BITS = 20
_RECIPROCALS = [-(-(1 << _QUOTIENT_BITS) // rows) for rows in range(1, _GROUP_ROWS + 1)]
_SIZES_LOG2 = [2 + (rows - 1).bit_length() for rows in range(1, _GROUP_ROWS + 1)]
_CONSTANTS = data.StructLayout({"other_rows": range(_GROUP_ROWS), "group": 4, "page": 1})


class EntryAddress(wiring.Component):
    """From rows to lines.

    Parameters
    ----------
    contexts : a power of two. lines : of four entries, in the store; a power of two. taken : heads take their lines.

    Members
    -------
    i_context : In, {valid, record}: broadcast.
    i_base : In, {valid, context, line}: broadcast; of builds whose heads take lines.
    contexts_log2 : In, contexts in use as a power of two, constant.
    context, head, row : In.
    page : Out, entries are KV page groups, one cycle later.
    line, lane : Out; size_log2 : Out, ceil(log2) of the tokens that an entry can hold: LATENCY cycles later.
    """

    #: Cycles from `row` to `line`.
    LATENCY = 7

    def __init__(self, contexts: int, lines: int, *, taken: bool = False) -> None:
        self._contexts, self._lines, self._taken = contexts, lines, taken
        base: dict[str, Any] = {"i_base": In(base_write(lines))} if taken else {}
        super().__init__(
            {
                **base,
                "i_context": In(data.StructLayout({"valid": 1, "record": ContextRecord})),
                "contexts_log2": In(range(CONTEXT_BITS + 1)),
                "context": In(CONTEXT_BITS),
                "head": In(HEAD_BITS),
                "row": In(TOKEN_BITS - 2),
                "page": Out(1),
                "line": Out(range(lines)),
                "lane": Out(2),
                "size_log2": Out(3),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Divide, multiply, add."""
        m = Module()
        record = self.i_context.record
        m.submodules.constants = memory = Memory(shape=_CONSTANTS, depth=self._contexts, init=[])
        write, read = memory.write_port(), memory.read_port(domain="comb")
        m.d.comb += [
            write.addr.eq(record.context),
            write.data.other_rows.eq(record.group_tokens[2:] - 1),
            write.data.group.eq(record.group),
            write.data.page.eq(record.page_mode),
            write.en.eq(self.i_context.valid),
            read.addr.eq(self.context),
        ]
        # Cycle 0: constants. Cycle 1: reciprocal. Cycles 2, 3: entry.
        rows, group, page = (register(m, value) for value in (read.data.other_rows, read.data.group, read.data.page))
        reciprocal = register(m, Array(C(value, _QUOTIENT_BITS + 1) for value in _RECIPROCALS)[rows])
        row = delay(m, self.row, 2)
        entry = delay(m, row * reciprocal, 2)[_QUOTIENT_BITS:]
        # Cycle 4: line within the context, a query head at a time.
        of_pages = delay(m, page, 3)
        place = register(m, Mux(of_pages, entry[2:], delay(m, row, 2)))
        lane = register(m, entry[:2])
        # Cycles 5, 6: address.
        if self._taken:
            base = register(m, read_base(m, self.i_base, delay(m, self.context, 4), self._contexts))
        else:
            base = context_base(delay(m, self.context, 5), self.contexts_log2, self._lines)
        start = register(m, base + delay(m, self.head, 5))
        line = register(m, register(m, place * delay(m, group, 4)) + start)
        sizes = Mux(page, Array(C(value, 3) for value in _SIZES_LOG2)[rows], 0)
        m.d.comb += [
            self.page.eq(page),
            self.line.eq(line),
            self.lane.eq(delay(m, lane, 2)),
            self.size_log2.eq(delay(m, sizes, self.LATENCY - 1)),
        ]
        return m
