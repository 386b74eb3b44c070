"""Benches of the stream elements."""

from typing import Any

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.stream.credit import CreditPipeline
from nearflash.gateware.stream.fork import Fork
from nearflash.gateware.stream.gearbox import Narrow, Widen
from nearflash.gateware.stream.join import Join
from nearflash.gateware.stream.queue import QueueMemory, StreamQueue
from nearflash.gateware.stream.skid import SkidBuffer
from nearflash.verify.proofs.proof import Bench
from nearflash.verify.proofs.properties import accept, check_order, check_source, moves, offer

__all__ = ["credit", "fork", "join", "narrow", "queue", "skid", "widen"]


def _buffer(dut: Any, capacity: int) -> tuple[Bench, Signal]:
    """Order, capacity, and no path through in either direction."""
    bench = Bench(dut)
    offer(bench, dut.i)
    accept(bench, dut.o)
    check_source(bench, dut.o)
    bench.no_paths += [(dut.o.ready, dut.i.ready), (dut.i.valid, dut.o.valid)]
    return bench, check_order(bench, dut.i, dut.o, capacity)


def skid(dut: Any = None) -> Bench:
    """Two items."""
    return _buffer(SkidBuffer(1) if dut is None else dut, 2)[0]


def queue(memory: QueueMemory) -> Bench:
    """Three items; `level` counts them."""
    dut = StreamQueue(1, 3, memory=memory)
    bench, inside = _buffer(dut, 3)
    bench.prove("level_counts_items", dut.level == inside)
    return bench


class _Delay(wiring.Component):
    """A datapath of two registers in a `CreditPipeline` whose queue holds three results."""

    i: In(stream.Signature(1))
    o: Out(stream.Signature(1))

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.credit = credit = CreditPipeline(2, 1, 1, depth=3)
        wiring.connect(m, wiring.flipped(self.i), credit.i)
        wiring.connect(m, credit.o, wiring.flipped(self.o))
        stage = Signal(reset_less=True)
        result = Signal(reset_less=True)
        m.d.sync += [stage.eq(credit.core_i), result.eq(stage)]
        m.d.comb += credit.core_o.eq(result)
        return m


def credit() -> Bench:
    """Latency 2, three places."""
    return _buffer(_Delay(), 3)[0]


def fork() -> Bench:
    """Three outputs: each gets every item exactly once."""
    dut = Fork(2, 3)
    bench = Bench(dut)
    offer(bench, dut.i)
    had = Signal(3)  # which outputs have had the item that is on i
    for index, o in enumerate(dut.o):
        accept(bench, o, f"o{index}")
        check_source(bench, o, f"o{index}")
        bench.prove(f"o{index}_once", o.valid == (dut.i.valid & ~had[index]))
        bench.prove(f"o{index}_same", ~o.valid | (o.payload == dut.i.payload))
    got = had | Cat(moves(o) for o in dut.o)
    bench.m.d.sync += had.eq(Mux(moves(dut.i), 0, got))
    bench.prove("taken_when_all_have_it", ~dut.i.valid | (dut.i.ready == got.all()))
    bench.cover("one_waits_for_two", (had == 0b101) & moves(dut.i))
    return bench


def join() -> Bench:
    """Two inputs."""
    dut = Join({"key": 1, "score": 2})
    bench = Bench(dut)
    offer(bench, dut.i.key, "key")
    offer(bench, dut.i.score, "score")
    accept(bench, dut.o)
    check_source(bench, dut.o)
    bench.prove("valid_when_both_are", dut.o.valid == (dut.i.key.valid & dut.i.score.valid))
    bench.prove("taken_together", Cat(moves(dut.i.key), moves(dut.i.score)) == moves(dut.o).replicate(2))
    same = (dut.o.payload.key == dut.i.key.payload) & (dut.o.payload.score == dut.i.score.payload)
    bench.prove("same_items", ~dut.o.valid | same)
    bench.cover("both", moves(dut.o))
    return bench


def narrow() -> Bench:
    """Ratio 3, counts up to 7. Each group carries its number in the transfer, so order shows in the data."""
    ratio, bits = 3, 4
    dut = Narrow(bits, ratio, count_width=3)
    bench = Bench(dut)
    offer(bench, dut.i)
    offer(bench, dut.i_count, "i_count")
    accept(bench, dut.o)
    check_source(bench, dut.o)
    beats, out = Signal(2), Signal(bits)  # beats taken of the transfer on i, groups given of that on o
    first, second, transfers = Signal(3), Signal(3), Signal(2)  # counts without their last group, oldest first
    empty = dut.i_count.payload == 0
    begins, ends = moves(dut.i_count) & ~empty, moves(dut.o) & dut.o.payload.last
    fresh = dut.o.valid & ~bench.past(dut.o.valid & ~dut.o.ready, "waited")
    beat = Mux(fresh & dut.o.payload.last, 0, beats)  # which one of its transfer is on i
    bench.m.d.sync += [beats.eq(beat + moves(dut.i)), transfers.eq(transfers + begins - ends)]
    with bench.m.If(moves(dut.o)):
        bench.m.d.sync += out.eq(Mux(dut.o.payload.last, 0, out + 1))
    with bench.m.If(ends):
        bench.m.d.sync += first.eq(second)
    with bench.m.If(begins):
        with bench.m.If(transfers == ends):
            bench.m.d.sync += first.eq(dut.i_count.payload)
        with bench.m.Else():
            bench.m.d.sync += second.eq(dut.i_count.payload)
    bench.assume(dut.i.payload == Cat((beat * ratio + slot)[:bits] for slot in range(ratio)))

    bench.prove("no_group_without_count", ~dut.o.valid | (transfers != 0))
    bench.prove("one_count_ahead", transfers <= 2)
    bench.prove("groups_in_order", ~dut.o.valid | (dut.o.payload.data == out))
    bench.prove("last_is_the_counted_one", ~dut.o.valid | (dut.o.payload.last == (out + 1 == first)))
    bench.prove("beats_are_counted", ~(fresh & dut.o.payload.last) | (beats == (first + (ratio - 1)) // ratio))
    bench.prove("empty_after_reset", ~bench.was_reset | ~dut.o.valid)
    bench.cover("tail", ends & (first == 4))
    bench.cover("seven", ends & (first == 7))
    bench.cover("empty_transfer", moves(dut.i_count) & empty)
    return bench


def widen() -> Bench:
    """Ratio 3: each beat equals a copy that the bench collects by itself."""
    ratio, bits = 3, 2
    dut = Widen(bits, ratio, strb_bits=1)
    bench = Bench(dut)
    offer(bench, dut.i)
    accept(bench, dut.o)
    check_source(bench, dut.o)
    m = bench.m
    data, strb, slot = Signal(bits * ratio), Signal(ratio), Signal(range(ratio))
    full, last = Signal(), Signal()
    group = dut.i.payload
    ends = group.last | (slot == ratio - 1)
    with m.If(moves(dut.o)):
        m.d.sync += [full.eq(0), strb.eq(0)]
    with m.If(moves(dut.i)):
        m.d.sync += [
            data.word_select(slot, bits).eq(group.data),
            strb.bit_select(slot, 1).eq(group.strb),
            slot.eq(Mux(ends, 0, slot + 1)),
            full.eq(ends),
            last.eq(group.last),
        ]
    live = Cat(bit.replicate(bits) for bit in strb)
    bench.prove("beat_when_complete", dut.o.valid == full)
    bench.prove("same_strobes", ~dut.o.valid | (dut.o.payload.strb == strb))
    bench.prove("same_data", ~dut.o.valid | (((dut.o.payload.data ^ data) & live) == 0))
    bench.prove("same_last", ~dut.o.valid | (dut.o.payload.last == last))
    bench.prove("empty_after_reset", ~bench.was_reset | ~dut.o.valid)
    bench.cover("full_beat", moves(dut.o) & strb.all())
    bench.cover("short_beat_at_full_rate", moves(dut.o) & last & (strb == 0b01) & moves(dut.i))
    return bench
