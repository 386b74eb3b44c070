"""Bench of the unpacker: groups of two fields of 4, 8 or 16 bits from words of 32 bits."""

from typing import Any

from amaranth.hdl import Array, Cat, Mux, Signal

from nearflash.gateware.weights.unpack import Unpack
from nearflash.verify.proofs.proof import Bench
from nearflash.verify.proofs.properties import accept, check_source, moves, offer

__all__ = ["unpack"]

_WIDTH, _PORT_BITS, _LANE_BITS, _COUNT_BITS = 2, 32, 16, 5
_SIZES_LOG2 = (2, 3, 4)


def unpack(dut: Any = None) -> Bench:
    """Group g of a count has its fields 2g and 2g + 1, which lie where they do in the words taken for it."""
    sizes = [1 << log2 for log2 in _SIZES_LOG2]
    dut = Unpack(_WIDTH, _PORT_BITS, sizes, lane_bits=_LANE_BITS, count_bits=_COUNT_BITS) if dut is None else dut
    bench = Bench(dut)
    m = bench.m
    offer(bench, dut.i_count, "i_count")
    offer(bench, dut.i)
    accept(bench, dut.o)
    check_source(bench, dut.o)
    size = bench.free(2, "size")
    m.d.comb += dut.size.eq(size)
    bench.assume(size < len(sizes))

    count, given, words = Signal(_COUNT_BITS), Signal(_COUNT_BITS + 1), Signal(_COUNT_BITS)  # fields; words taken
    full, data, last = Signal(), Signal(_WIDTH * _LANE_BITS), Signal()
    active = given < count
    begun = bench.past(moves(dut.i_count), "begun")
    bench.assume(~active | begun | (size == bench.past(size, "size_past")))
    step = active & dut.i.valid & (dut.o.ready | ~full)
    ends = given + _WIDTH >= count
    log2 = Array(_SIZES_LOG2)[size]
    at = (given << log2)[:5]  # of the group, within its word
    fields = [(dut.i.payload >> (at + (lane << log2)))[:16] & Array((1 << bits) - 1 for bits in sizes)[size]
              for lane in range(_WIDTH)]  # fmt: skip
    word_ends = at + (_WIDTH << log2) == _PORT_BITS
    m.d.sync += full.eq(step | (full & ~dut.o.ready))
    with m.If(step):
        m.d.sync += [
            data.eq(Cat(Mux(given + lane < count, field, 0) for lane, field in enumerate(fields))),
            last.eq(ends),
            given.eq(given + _WIDTH),
            words.eq(words + moves(dut.i)),
        ]
    with m.If(moves(dut.i_count)):
        m.d.sync += [count.eq(dut.i_count.payload), given.eq(0), words.eq(0)]

    filled = ((count << log2) + (_PORT_BITS - 1)) >> 5
    bench.prove("a_group_when_there_is_one", dut.o.valid == full)
    bench.prove("same_fields", ~dut.o.valid | (dut.o.payload.data == data))
    bench.prove("last_is_the_counted_one", ~dut.o.valid | (dut.o.payload.last == last))
    bench.prove("a_word_when_it_is_used_up", dut.i.ready == (step & (ends | word_ends)))
    bench.prove("words_are_counted", ~(step & ends) | (words + 1 == filled))
    bench.prove("next_count_behind_the_last_group", dut.i_count.ready == (~active | (step & ends)))
    bench.prove("empty_after_reset", ~bench.was_reset | ~dut.o.valid)
    bench.no_paths += [(dut.i.valid, dut.o.valid), (dut.i_count.valid, dut.i.ready)]
    bench.cover("seven_bytes", moves(dut.o) & last & (count == 7) & (words == 2) & (size == 1) & (data == 0x11))
    bench.cover("nothing", moves(dut.i_count) & (dut.i_count.payload == 0))
    bench.cover("a_count_with_the_last_group", step & ends & moves(dut.i_count) & (count == 3))

    # Invariants: what is left, and which group of the word on `i` is next.
    used = at >> (log2 + 1)
    bench.prove("inner_some", bench.probe("some", 1) == active)
    bench.prove("inner_left", ~active | (bench.probe("left", _COUNT_BITS) == count - given))
    bench.prove("inner_last", ~active | (bench.probe("last", 1) == ends))
    bench.prove("inner_slot", bench.probe("slot", 2) == Mux(active, used, 0))
    bench.prove("inner_given", (given[0] == 0) & (given <= count + 1))
    bench.prove("inner_words", ~active | (words == (given << log2) >> 5))
    return bench
