"""Bench of the counter of ones: words of 64 bits, sections of up to 512.

The bench sums the bits that the counter chose of a word, which are the right ones, by eights as the counter does: sums
do not depend on the order.
"""

from typing import Any

from amaranth.hdl import Cat, Mux, Signal

from nearflash.gateware.weights.popcount import Counted, OnesCounter
from nearflash.verify.proofs.proof import Bench

__all__ = ["ones"]

_PORT_BITS, _BITS_MAX = 64, 512
_LATENCY = OnesCounter.latency(_PORT_BITS)


def ones(dut: Any = None) -> Bench:
    """Of all words since `begin`, the bits within the section: how many count, and whether others are set."""
    dut = OnesCounter(_PORT_BITS, _BITS_MAX) if dut is None else dut
    bench = Bench(dut)
    m = bench.m
    begin, enable, bits = bench.free(1, "begin"), bench.free(1, "enable"), bench.free(10, "bits")
    word, counted = bench.free(_PORT_BITS, "word"), bench.free(Counted, "counted")
    m.d.comb += [dut.begin.eq(begin), dut.enable.eq(enable), dut.bits.eq(bits), dut.word.eq(word)]
    m.d.comb += dut.counted.eq(counted)
    rests = Signal(range(_LATENCY + 1), reset_less=True)  # cycles since the last word, at most so many
    m.d.sync += rests.eq(Mux(enable, 0, rests + (rests < _LATENCY)))
    begun = Signal()
    m.d.sync += begun.eq(begun | begin)
    bench.assume((bits <= _BITS_MAX) & (counted <= 2))
    bench.assume(~begin | (~enable & (rests >= _LATENCY - 1)))
    bench.assume(~enable | begun)

    size, at = Signal(10), Signal(11)  # of the section; where in it the next word is, at its end where there is none
    there, chosen = Signal(_PORT_BITS), Signal(_PORT_BITS)  # of the word
    total, beyond = Signal(10), Signal()
    m.d.comb += [there.eq(Cat(at + k < size for k in range(_PORT_BITS))), chosen.eq(_chosen(word & there, counted))]
    more = [Signal(8, name="more")]  # of the word; of those in the tree
    inner = bench.probe("chosen", _PORT_BITS)
    m.d.comb += more[0].eq(_sum([bit & enable for bit in inner]))
    for k in range(1, _LATENCY):
        more.append(Signal(8, name=f"more_{k}", reset_less=True))
        m.d.sync += more[k].eq(more[k - 1])
    late = Signal(10)
    m.d.sync += late.eq(late + more[-1])
    with m.If(enable):
        m.d.sync += [
            at.eq(Mux(at + _PORT_BITS < size, at + _PORT_BITS, size)),
            total.eq(total + more[0]),
            beyond.eq(beyond | (word & ~there).any()),
        ]
    with m.If(begin):
        m.d.sync += [size.eq(bits), at.eq(0), *(signal.eq(0) for signal in (total, late, beyond))]

    bench.prove("same_bits", inner == chosen)
    settled = begun & (rests >= _LATENCY - 1)
    bench.prove("count_of_all_words", ~settled | (dut.count == total))
    bench.prove("beyond_tells", ~settled | (dut.beyond == beyond))
    bench.cover("a_section_ends_within_a_word", settled & (size == 200) & (total == 200) & ~beyond)
    bench.cover("threes", settled & (counted == Counted.THREES_OF_2) & (size == 130) & (total == 65) & beyond)

    # Invariants: what of the words is in the tree and what is counted; which bits of the next word are of the section.
    left = Mux(begun, size - at, 0)[:10]
    bench.prove("inner_late", dut.count == late)
    for level in range(1, _LATENCY):
        sums = range(-(-_PORT_BITS // 8**level))
        inside = [bench.probe(f"sum_{level}_{k}", min(1 + 3 * level, 8)) for k in sums]
        bench.prove(f"inner_level_{level}", _sum(inside) == more[level])
    bench.prove("inner_total", ~begun | ((late + sum(more[1:]))[: len(total)] == total))
    bench.prove("inner_rests", Cat((rests >= k) & (more[k] != 0) for k in range(1, _LATENCY)) == 0)
    bench.prove("inner_before", begun | ((size == 0) & (at == 0) & (dut.beyond == 0)))
    bench.prove("inner_at", (at == size) | ((at < size) & (at % _PORT_BITS == 0)))
    bench.prove("inner_beyond", dut.beyond == beyond)
    bench.prove("inner_left", bench.probe("left", 10) == left)
    chunks = range(_PORT_BITS // 64)
    bench.prove("inner_whole", bench.probe("whole", len(chunks)) == Cat(left[6:] > k for k in chunks))
    last = Cat((left[6:] == k) & left[:6].any() for k in chunks)
    bench.prove("inner_last", bench.probe("last", len(chunks)) == last)
    bench.prove("inner_tail", ~begun | (bench.probe("tail", 64) == Cat(size[:6] > k for k in range(64))))
    return bench


def _chosen(ones: Any, counted: Any) -> Any:
    chosen = ones
    for what, step in ((Counted.THREES_OF_4, 4), (Counted.THREES_OF_2, 2)):
        lowest = sum(1 << k for k in range(0, _PORT_BITS, step))
        chosen = Mux(counted == what, ones & (ones >> 1) & lowest, chosen)
    return chosen


def _sum(bits: Any) -> Any:
    summands = list(bits)
    while len(summands) > 1:
        summands = [sum(summands[k : k + 8]) for k in range(0, len(summands), 8)]
    return summands[0]
