"""Bench of the packer: groups of two lanes to words of 64 bits."""

from typing import Any

from amaranth.hdl import Cat, Mux, Signal

from nearflash.gateware.weights.pack import Pack
from nearflash.verify.proofs.proof import Bench
from nearflash.verify.proofs.properties import accept, check_source, moves, offer

__all__ = ["pack"]

_WIDTH, _PORT_BITS = 2, 64
_PLACES = _PORT_BITS // (8 * _WIDTH)
"""Of a word: half as many lanes of 16 bits as of bytes fill one."""


def pack(dut: Any = None) -> Bench:
    """Each word is the groups since the word before, shifted in from above, so that the first one ends up lowest."""
    dut = Pack(_WIDTH, _PORT_BITS) if dut is None else dut
    bench = Bench(dut)
    offer(bench, dut.i)
    accept(bench, dut.o)
    check_source(bench, dut.o)
    narrow = bench.free(1, "narrow")
    text, places, full = Signal(_PORT_BITS), Signal(range(_PLACES)), Signal()
    group, lanes = moves(dut.i), [dut.i.payload.word_select(lane, 16) for lane in range(_WIDTH)]
    bench.m.d.comb += dut.narrow.eq(narrow)
    bench.assume((places == 0) | (narrow == bench.past(narrow, "narrow_past")))

    filled = places + Mux(narrow, 1, 2)
    ends = group & (filled == _PLACES)
    bench.m.d.sync += full.eq(ends | (full & ~dut.o.ready))
    with bench.m.If(group):
        bench.m.d.sync += [
            places.eq(Mux(ends, 0, filled)),
            text.eq(Mux(narrow, Cat(text, *(lane[:8] for lane in lanes))[-_PORT_BITS:], Cat(text, *lanes)[32:])),
        ]
    bench.prove("a_word_when_complete", dut.o.valid == full)
    bench.prove("same_bytes", ~dut.o.valid | (dut.o.payload == text))
    bench.prove("takes_a_group_when_there_is_room", dut.i.ready == (dut.o.ready | ~full))
    bench.prove("empty_after_reset", ~bench.was_reset | ~dut.o.valid)
    bench.no_paths += [(dut.i.valid, dut.o.valid), (dut.i.valid, dut.i.ready)]
    changed = bench.past(moves(dut.o) & narrow, "narrow_before") & ~narrow
    bench.cover("bytes", moves(dut.o) & narrow & (dut.o.payload == 0x0706050403020100))
    bench.cover("lanes_behind_bytes", changed & group)
    bench.cover("a_word_moves_with_a_group", moves(dut.o) & group)

    # Invariants: what has come of a word lies in its low places, and at the top of `text`.
    bench.prove("inner_place", bench.probe("place", 2) == places)
    bench.prove("inner_pair", narrow | (places[0] == 0))
    bench.prove("inner_whole", ~full | (places == 0))
    for count in range(1, _PLACES):
        bits = count * 8 * _WIDTH
        bench.prove(f"inner_bytes_{count}", (places != count) | (dut.o.payload[:bits] == text[-bits:]))
    return bench
