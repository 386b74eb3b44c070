"""Benches of the expanders' parts."""

from typing import Any

from amaranth.hdl import Array, Cat, Const, Mux, Signal
from amaranth.lib import stream

from nearflash.abi.crc import CRC_RESIDUE
from nearflash.abi.topk import MAGIC, TILE_BITS, TILE_PARAMS, VERSION, StreamFault, StreamHeader, ValueFormat
from nearflash.gateware.expand.bitmap import BitmapExpander
from nearflash.gateware.expand.header import HeaderCheck, TopKCommand
from nearflash.gateware.expand.pairs import PairMerge
from nearflash.gateware.nfc.crc import Crc32c
from nearflash.sim.formal.bench import Bench
from nearflash.sim.formal.properties import accept, check_source, moves, offer

__all__ = ["bitmap", "header", "merge"]

_WIDTH = 4


def bitmap(dut: Any = None) -> Bench:
    """Beats of four elements: each beat of the bitmap gives one, its ones the next values of its row.

    One value at most is marked, with all its bits; it comes out where it belongs, and only there (see properties.py).
    """
    dut = BitmapExpander(_WIDTH, 8) if dut is None else dut
    bench = Bench(dut)
    m = bench.m
    values = stream.Signature(_WIDTH).create()  # marks of a word
    offer(bench, dut.i_bitmap, "i_bitmap")
    offer(bench, values, "i_value")
    accept(bench, dut.o)
    check_source(bench, dut.o)
    m.d.comb += [
        dut.i_value.valid.eq(values.valid),
        dut.i_value.payload.eq(Cat(mark.replicate(dut.element_bits) for mark in values.payload)),
        values.ready.eq(dut.i_value.ready),
    ]
    enters, leaves, word = moves(dut.i_bitmap), moves(dut.o), moves(values)

    # The beats inside, and of the oldest one: where its values are among the words inside.
    beats, inside = Array(Signal(_WIDTH + 1, name=f"beat_{n}") for n in range(4)), Signal(range(5))
    bits, last = beats[0][:_WIDTH], beats[0][_WIDTH]
    words, place = Signal(range(8)), Signal(range(_WIDTH))
    places = [place + sum(bits[:k]) for k in range(_WIDTH + 1)]
    end, used, needed = Signal(range(2 * _WIDTH)), Signal(2), Signal(2)
    m.d.comb += [
        end.eq(places[-1]),
        needed.eq((end + _WIDTH - 1) // _WIDTH),
        used.eq(Mux(leaves, Mux(last, needed, end // _WIDTH), 0)),
    ]
    m.d.sync += [inside.eq(inside + enters - leaves), words.eq(words + word - used)]
    with m.If(leaves):
        m.d.sync += [beats[n].eq(beats[n + 1]) for n in range(3)]
        m.d.sync += place.eq(Mux(last, 0, end))
    with m.If(enters):
        m.d.sync += beats[inside - leaves].eq(dut.i_bitmap.payload)

    marked, tracked, at = Signal(), Signal(), Signal(range(8 * _WIDTH))  # the marked value, among those inside
    marks = values.payload
    lane = Cat(marks[1] | marks[3], marks[2] | marks[3])
    mark = word & (marks != 0)
    m.d.sync += marked.eq(marked | mark)
    with m.If(mark):
        m.d.sync += [tracked.eq(1), at.eq(Cat(lane, (words - used)[:3]))]
    with m.Elif(tracked):
        m.d.sync += [tracked.eq(at >= used * _WIDTH), at.eq(at - used * _WIDTH)]
    bench.assume(~values.valid | ((marks & (marks - 1)) == 0))
    bench.assume(~(values.valid & (marks != 0) & marked))

    expected = Cat(
        (bit & tracked & (at == where)).replicate(dut.element_bits)
        for bit, where in zip(bits, places[:-1], strict=True)
    )
    bench.prove("a_beat_for_a_beat", ~dut.o.valid | (inside != 0))
    bench.prove("three_beats_inside", inside <= 3)
    bench.prove("five_words_inside", words <= 5)
    bench.prove("values_came_before", ~dut.o.valid | (words >= needed))
    bench.prove("values_at_their_places", ~dut.o.valid | (dut.o.payload.data == expected))
    bench.prove("same_last", ~dut.o.valid | (dut.o.payload.last == last))
    bench.prove("empty_after_reset", ~bench.was_reset | ~dut.o.valid)
    waits, starves = Signal(range(8)), Signal(range(8))  # cycles
    complete = (inside != 0) & (words >= needed)
    m.d.sync += [
        waits.eq(Mux(complete & ~dut.o.valid, waits + ~waits.all(), 0)),
        starves.eq(Mux((inside != 0) & ~complete & ~values.ready, starves + ~starves.all(), 0)),
    ]
    bench.prove("a_beat_with_its_values_comes_out", waits < dut.VALUE_LATENCY)
    bench.prove("takes_values_that_are_wanted", starves < 2)
    bench.prove("takes_a_beat_when_empty", (inside != 0) | dut.i_bitmap.ready)

    # Invariants, so that it is inductive: what each register holds, by what was seen outside.
    valid, full = ([bench.probe(f"{name}_{k}", 1) for k in range(2)] for name in ("valid", "full"))
    before = bench.probe("place", 2)
    first = Mux(dut.o.valid, Mux(last, needed * _WIDTH, end), place)  # stage 1's values begin here
    first_beat, second_beat = beats[dut.o.valid], beats[dut.o.valid + valid[1]]
    first_end = first + sum(first_beat[:_WIDTH])
    second = Mux(valid[1], Mux(first_beat[_WIDTH], (first_end + _WIDTH - 1) & -_WIDTH, first_end), first)[:5]

    def marks_from(where: Any) -> Any:
        return Cat((tracked & (at == where + k)).replicate(dut.element_bits) for k in range(_WIDTH))

    bench.prove("inner_inside", inside == dut.o.valid + valid[0] + valid[1])
    bench.prove("inner_place", (before == second[:2]) & ((before == 0) | full[0]))
    bench.prove("inner_words", words == (second >> 2) + full[0] + full[1])
    bench.prove("inner_mark", ~tracked | (marked & (at >> 2 < words)))
    for k, index in enumerate((second >> 2, (second >> 2) + full[0])):
        bench.prove(f"inner_word_{k}", ~full[k] | (bench.probe(f"word_{k}", 32) == marks_from(index * _WIDTH)))
    for k, beat in enumerate((second_beat, first_beat)):
        same = Cat(bench.probe(f"bits_{k}", _WIDTH), bench.probe(f"last_{k}", 1)) == beat
        bench.prove(f"inner_beat_{k}", ~valid[k] | same)
    for k, size in enumerate((1, 2, 3, 3, 3)):
        count = bench.probe(f"ones_{k}", size)
        bench.prove(f"inner_ones_{k}", ~valid[0] | (count == sum(second_beat[:k])))
    packed = bench.probe("packed", 32)
    for k in range(_WIDTH):
        distance = bench.probe(f"shift_1_{k}", 2)
        bench.prove(f"inner_shift_{k}", ~valid[1] | (distance == k - sum(first_beat[:k])))
        some = ~valid[1] | (sum(first_beat[:_WIDTH]) <= k)
        same = packed.word_select(k, 8) == (tracked & (at == first + k)).replicate(8)
        bench.prove(f"inner_packed_{k}", some | same)
    bench.prove("inner_came", ~valid[1] | (words * _WIDTH >= first_end))
    bench.no_paths += [(dut.i_bitmap.valid, dut.o.valid), (dut.i_value.valid, dut.o.valid)]
    bench.cover("a_row_ends_in_the_second_word", leaves & last & (end > _WIDTH))
    bench.cover("the_last_of_two_words", leaves & tracked & (at == 2 * _WIDTH - 2) & (end == 2 * _WIDTH - 1))
    bench.cover("what_is_left_of_a_word_is_dropped", leaves & last & tracked & (at == end) & (end[:2] != 0))
    bench.cover("full", inside == 3)
    return bench


def header(dut: Any = None) -> Bench:
    """All words of a command are taken and no others, and one start tells what its header says or what is wrong."""
    dut = HeaderCheck() if dut is None else dut
    bench = Bench(dut)
    m = bench.m
    offer(bench, dut.i_command, "i_command")
    offer(bench, dut.i)
    accept(bench, dut.o_start, "o_start")
    accept(bench, dut.o)
    check_source(bench, dut.o_start, "o_start")
    check_source(bench, dut.o)
    m.submodules.crc = crc = Crc32c()
    word, start = moves(dut.i), dut.o_start.payload
    command, active, started = Signal(TopKCommand), Signal(), Signal()
    words, seen = Signal(29), Signal(range(5))  # left; of the header
    text = Signal(256)
    m.d.comb += [crc.enable.eq(word & (seen < 4)), crc.first.eq(seen == 0), crc.data.eq(dut.i.payload)]
    m.d.sync += [words.eq(words - word), started.eq(started | moves(dut.o_start))]
    with m.If(crc.enable):
        m.d.sync += [seen.eq(seen + 1), text.word_select(seen[:2], 64).eq(dut.i.payload)]
    with m.If(started & (words == 0)):
        m.d.sync += [active.eq(0), started.eq(0)]
    with m.If(moves(dut.i_command)):
        m.d.sync += [command.eq(dut.i_command.payload), words.eq(dut.i_command.payload.stream_bytes >> 3)]
        m.d.sync += [active.eq(1), seen.eq(0)]

    magic = text[:48] != Cat(Const(int.from_bytes(MAGIC, "little"), 32), Const(VERSION, 16))
    form = (text[48:56] >= len(ValueFormat)) | (text[56:64] != TILE_BITS)
    params = (text[64:96] != command.params) | (text[96:128] != (command.params + (TILE_PARAMS - 1)) >> TILE_BITS)
    length = (text[160:192] != command.stream_bytes) | (command.stream_bytes[:3] != 0)
    fault = Signal(StreamFault)
    for wrong, kind in (
        (length, StreamFault.LENGTH),
        (form | params, StreamFault.HEADER),
        (crc.o != CRC_RESIDUE, StreamFault.CHECKSUM),
        (magic, StreamFault.HEADER),
        (seen < 4, StreamFault.LENGTH),
    ):
        with m.If(wrong):
            m.d.comb += fault.eq(kind)
    good = fault == StreamFault.NONE
    says = (start.pairs == text[128:160]) & (start.value_format == text[48:50])
    bench.prove("one_start_a_command", ~dut.o_start.valid | (active & ~started))
    bench.prove("start_behind_the_header", ~dut.o_start.valid | (seen == 4) | (words == 0))
    bench.prove("start_names_the_fault", ~dut.o_start.valid | (start.fault == fault))
    bench.prove("start_has_the_words", ~dut.o_start.valid | (start.words == Mux(good, words, 0)))
    bench.prove("start_has_the_params", ~dut.o_start.valid | (start.params == command.params))
    bench.prove("start_says_what_the_header_says", ~(dut.o_start.valid & good) | says)
    bench.prove("no_word_of_another_command", ~dut.i.ready | (active & (words != 0)))
    bench.prove("words_pass_behind_a_good_header", dut.o.valid == (dut.i.valid & started & good & (words != 0)))
    bench.prove("words_pass_one_for_one", moves(dut.o) == (word & started & good))
    bench.prove("same_words", ~dut.o.valid | (dut.o.payload == dut.i.payload))
    bench.prove("next_command_when_all_were_taken", dut.i_command.ready == ~active)
    bench.prove("takes_the_header", ~active | started | (seen == 4) | (words == 0) | dut.i.ready)
    bench.prove("drops_behind_a_bad_header", ~started | good | (words == 0) | dut.i.ready)
    waits = bench.past(active & ~started & ((seen == 4) | (words == 0)), "judges")
    bench.prove("starts_in_time", ~waits | ~bench.past(waits, "judged") | dut.o_start.valid | started)
    bench.no_paths += [(dut.o.ready, dut.o_start.valid), (dut.i.valid, dut.i.ready)]
    example = int.from_bytes(StreamHeader(ValueFormat.FP16, 5, 2, 40).pack(), "little")
    bench.cover("a_good_header", moves(dut.o_start) & good & (text == example) & (words == 1))
    bench.cover("half_a_header", moves(dut.o_start) & (seen == 2))
    bench.cover("a_word_dropped", word & started & ~good & (seen == 4))

    # Invariants: what was seen outside decides the state, and what each word of the header left.
    state = bench.probe("fsm_state", 3)
    judged, wrongs = Signal(), [bench.probe(f"wrong.{name}", 1) for name in ("magic", "params", "length")]
    m.d.sync += judged.eq(active & ~started & ((seen == 4) | (words == 0)))
    expected = Mux(~active, 0, Mux(started, 4, Mux(judged, 3, Mux(seen == 4, 2, 1))))
    bench.prove("inner_state", state == expected)
    bench.prove("inner_seen", (seen <= 4) & (~(active & (judged | started)) | (seen == 4) | (words == 0)))
    bench.prove("inner_active", active | ~(judged | started))
    bench.prove("inner_words", ~active | (bench.probe("words_left", 29) == words))
    bench.prove("inner_command", ~active | (bench.probe("command", 64) == command.as_value()))
    bench.prove("inner_number", ~active | judged | started | (bench.probe("number", 2) == seen[:2]))
    bench.prove("inner_crc", ~active | (seen == 0) | started | (bench.probe("crc.o", 32) == crc.o))
    bench.prove("inner_magic", (seen < 1) | (wrongs[0] == magic))
    bench.prove("inner_form", (seen != 1) | (wrongs[1] == form))
    bench.prove("inner_params", (seen < 2) | (wrongs[1] == (form | params)))
    bench.prove("inner_length", (seen < 3) | (wrongs[2] == length))
    bench.prove("inner_format", (seen < 1) | (start.value_format == text[48:50]))
    bench.prove("inner_pairs", (seen < 3) | (start.pairs == text[128:160]))
    bench.prove("inner_fault", ~(active & (judged | started)) | (start.fault == fault))
    bench.prove("inner_no_fault", ~active | judged | started | (start.fault == StreamFault.NONE))
    return bench


def merge(dut: Any = None) -> Bench:
    """Groups of four: as many as the parameters say, a thousand and 24 a tile, zeros where there are no pairs."""
    dut = PairMerge(4) if dut is None else dut
    bench = Bench(dut)
    m = bench.m
    offer(bench, dut.i_params, "i_params")
    offer(bench, dut.i_tile, "i_tile")
    offer(bench, dut.i)
    accept(bench, dut.o)
    check_source(bench, dut.o)
    begins, failed = moves(dut.i_params), bench.free(1, "failed")
    m.d.comb += dut.failed.eq(failed)
    bench.assume(failed | ~bench.past(failed & ~begins, "failed_before"))

    fresh = dut.o.valid & ~bench.past(dut.o.valid & ~dut.o.ready, "waited")  # a group that was made the cycle before
    left, number = Signal(32), Signal(TILE_BITS - 2)  # groups; of the tile's next one
    tile, pairs = Signal(), Signal()  # one is being merged; with pairs
    m.d.sync += [left.eq(left - fresh), number.eq(number + fresh)]
    with m.If(dut.i_tile.ready):
        m.d.sync += [tile.eq(dut.i_tile.valid), pairs.eq(dut.i_tile.valid & dut.i_tile.payload)]
    with m.If(begins):
        m.d.sync += [left.eq((dut.i_params.payload + 3) >> 2), number.eq(0), tile.eq(0), pairs.eq(0)]
    had_tile, had_pairs, had_failed = (
        bench.past(value, name) for value, name in ((tile, "had_tile"), (pairs, "had_pairs"), (failed, "had_failed"))
    )
    idle = (left == 0) & ~dut.o.valid
    bench.prove("as_many_groups", ~fresh | (left != 0))
    bench.prove("last_group", ~fresh | (dut.o.payload.last == (left == 1)))
    bench.prove("no_group_without_a_tile", ~fresh | had_tile | had_failed)
    bench.prove("zeros_without_pairs", ~fresh | had_pairs | (dut.o.payload.data == 0))
    bench.prove("zeros_where_it_failed", ~(fresh & had_failed) | (dut.o.payload.data == 0))
    bench.prove("a_tile_when_the_one_before_is_done", ~(moves(dut.i_tile) & tile) | ((number + fresh)[:10] == 1023))
    bench.prove("next_command_when_idle", (dut.i_params.ready == idle) & (dut.idle == idle))
    bench.prove("empty_after_reset", ~bench.was_reset | ~dut.o.valid)
    waits, free = Signal(range(4)), failed | (tile & ~pairs)  # of pairs
    m.d.sync += waits.eq(Mux((left != 0) & free & ~dut.o.valid, waits + ~waits.all(), 0))
    bench.prove("groups_without_pairs_do_not_wait", waits < 2)
    bench.no_paths += [(dut.i.valid, dut.o.valid), (dut.i_tile.valid, dut.o.valid), (dut.i.valid, dut.i.ready)]
    bench.cover("last_of_a_failure", moves(dut.o) & dut.o.payload.last & had_failed & (number == 2))
    bench.cover(
        "a_group_of_four_pairs", moves(dut.o) & Cat(dut.o.payload.data.word_select(k, 32).any() for k in range(4)).all()
    )

    groups_left, group = bench.probe("groups_left", 32), bench.probe("group", TILE_BITS - 2)
    bench.prove("inner_left", groups_left == left - fresh)
    bench.prove("inner_some", bench.probe("some", 1) == (groups_left != 0))
    bench.prove("inner_group", group == (number + fresh)[: TILE_BITS - 2])
    bench.prove("inner_tile", bench.probe("active", 1) == tile)
    bench.prove("inner_pairs", pairs | ~bench.probe("pairs_left", 1))
    return bench
