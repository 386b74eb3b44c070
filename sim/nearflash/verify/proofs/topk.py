"""Bench of the selector."""

from amaranth.hdl import Mux, ResetSignal, Signal

from nearflash.gateware.attention.select.select import RadixSelector
from nearflash.verify.proofs.proof import Bench
from nearflash.verify.proofs.properties import accept, moves, offer

__all__ = ["RUN_CYCLES", "selector"]

RUN_CYCLES = 56
"""From the reset to the end of the selection, at most: what a bounded proof has to cover."""

_LANES, _BEATS, _KEY_BITS = 4, 2, 2


def selector() -> Bench:
    """Up to eight keys of two bits, in one selection after a reset, with no stalls: a run of RUN_CYCLES at most.

    What is marked is counted; and of any two entries, `early` and `late`, the one with the larger key is marked first,
    of equals the early one. Both together say which entries are marked.
    """
    dut = RadixSelector(_LANES * _BEATS, key_bits=_KEY_BITS)
    bench = Bench(dut)
    m = bench.m
    offer(bench, dut.i)
    offer(bench, dut.i_command, "i_command")
    accept(bench, dut.o)
    age, ended = Signal(range(RUN_CYCLES + 1)), Signal()
    m.d.sync += age.eq(age + (age != RUN_CYCLES))
    bench.assume(ResetSignal() == 0)
    bench.assume(dut.i.valid & dut.o.ready)

    beats, count, entries, commanded = Signal(2), Signal(4), Signal(4), Signal()
    final = dut.i.payload.last
    bench.assume(dut.i.payload.local == 0)
    bench.assume((dut.i.payload.valid & (dut.i.payload.valid + 1)) == 0)
    bench.assume(dut.i.payload.valid.any() & (final | dut.i.payload.valid.all()))
    bench.assume(final | (beats != _BEATS - 1))
    bench.assume(dut.i_command.valid == ~commanded)
    with m.If(moves(dut.i_command)):
        m.d.sync += commanded.eq(1)
        m.d.sync += count.eq(Mux(dut.i_command.payload.count > 8, 8, dut.i_command.payload.count))
    with m.If(moves(dut.i)):
        m.d.sync += [beats.eq(beats + 1), entries.eq(entries + sum(dut.i.payload.valid))]

    out, marked = Signal(2), Signal(4)
    total = marked + sum(dut.o.payload.mask)
    with m.If(moves(dut.o)):
        m.d.sync += [out.eq(out + 1), marked.eq(total)]
    ends = moves(dut.o) & dut.o.payload.last
    m.d.sync += ended.eq(ended | ends)
    bench.prove("ends", ended | (age != RUN_CYCLES))
    bench.prove("marks_the_count", ~ends | (total == Mux(count < entries, count, entries)))
    bench.prove("last_with_the_last_keys", ~dut.o.valid | (dut.o.payload.last == (out + 1 == beats)))

    early, late = Signal(3), Signal(3)
    with m.If(bench.was_reset):
        m.d.sync += [early.eq(bench.free(3, "early_choice")), late.eq(bench.free(3, "late_choice"))]
    found = []
    for place in (early, late):
        key, mark = Signal(_KEY_BITS), Signal()
        with m.If(moves(dut.i) & (beats == place[2:])):
            m.d.sync += key.eq(dut.i.payload.keys[place[:2]])
        with m.If(moves(dut.o) & (out == place[2:])):
            m.d.sync += mark.eq(dut.o.payload.mask.bit_select(place[:2], 1))
        found.append((key, mark))
    (early_key, early_mark), (late_key, late_mark) = found
    done = bench.past(ends, "done") & (early < late) & (late < entries)
    bench.prove("late_only_if_larger", ~done | early_mark | ~late_mark | (late_key > early_key))
    bench.prove("early_only_if_not_smaller", ~done | late_mark | ~early_mark | (early_key >= late_key))
    bench.prove("nothing_beyond", ~bench.past(ends, "ended") | ~(late_mark & (late >= entries)))
    bench.cover("some_of_two_beats", ends & (beats == 2) & (total == 3))
    return bench
