"""Entries: what the selection stores, and how its items travel."""

from typing import Any

from amaranth import Module, Value, signed
from amaranth.lib import data, enum
from amaranth.lib.memory import Memory

from nearflash.abi.attention.fixed_point import LOGIT_BITS, LOGIT_LSB, MASS_BITS, MAX_LOGIT_BITS
from nearflash.gateware.attention.engine.interfaces import CONTEXT_BITS, HEAD_BITS, TOKEN_BITS, ScoreRow
from nearflash.gateware.attention.select.keystore import LANES

__all__ = [
    "ENTRY",
    "FLOOR_BITS",
    "FRACTION_BITS",
    "EntryRow",
    "Order",
    "ScoreItem",
    "base_write",
    "context_base",
    "read_base",
]

FLOOR_BITS = LOGIT_BITS + LOGIT_LSB
"""Bits of a logit's floor."""
FRACTION_BITS = MAX_LOGIT_BITS - FLOOR_BITS
"""Fraction bits of an entry's largest logit."""

#: An entry as it is stored: its largest logit, and its mass relative to the floor of that.
ENTRY = data.StructLayout({"x_max": signed(MAX_LOGIT_BITS), "mass": MASS_BITS})


class Order(enum.Enum, shape=2):
    """Purpose of an item."""

    SCORE = 0
    """Scores become entries; the head's maximum rises."""
    CLEAR = 1
    """The head's maximum falls to the least value."""
    LOAD = 2
    """The head's maximum is read."""


class ScoreItem(data.Struct):
    """A row of scores, or another order about its context and head."""

    order: Order
    row: ScoreRow


class EntryRow(data.Struct):
    """Entries for one line of the store, those in `mask`; or another order."""

    order: Order
    context: CONTEXT_BITS
    head: HEAD_BITS
    address: TOKEN_BITS
    entries: data.ArrayLayout(ENTRY, LANES)
    mask: LANES
    top: signed(FLOOR_BITS)
    """Floor of the largest logit."""
    outside: 1
    """A logit was outside its range."""


def context_base(context: Value, contexts_log2: Value, lines: int) -> Value:
    """First line of a context's share, where 2^contexts_log2 contexts share `lines` lines, a power of two."""
    line_bits = (lines - 1).bit_length()
    return ((context << line_bits) >> contexts_log2)[:line_bits]


def base_write(lines: int) -> data.StructLayout:
    """Layout of a broadcast: a context has its lines from `line` on."""
    return data.StructLayout({"valid": 1, "context": CONTEXT_BITS, "line": range(lines)})


def read_base(m: Module, write: Any, context: Value, contexts: int) -> Value:
    """First line that the last broadcast `write` to a context said, in the same cycle."""
    memory = Memory(shape=len(write.line), depth=contexts, init=[])
    m.submodules += memory
    port, read = memory.write_port(), memory.read_port(domain="comb")
    m.d.comb += [
        port.addr.eq(write.context),
        port.data.eq(write.line),
        port.en.eq(write.valid),
        read.addr.eq(context),
    ]
    return read.data
