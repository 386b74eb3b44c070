"""Bench of the header check of Top-K streams."""

from typing import Any

from amaranth.hdl import Cat, Const, Mux, Signal

from nearflash.abi.crc import CRC_RESIDUE
from nearflash.abi.topk import MAGIC, TILE_BITS, TILE_PARAMS, VERSION, StreamFault, StreamHeader, ValueFormat
from nearflash.gateware.coding.crc import Crc32c
from nearflash.gateware.gradients.header import HeaderCheck, TopKCommand
from nearflash.verify.proofs.proof import Bench
from nearflash.verify.proofs.properties import accept, check_source, moves, offer

__all__ = ["header"]


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
    m.d.comb += dut.crc.eq(crc.o)
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
    bench.prove("more_words_of_the_start", ~(dut.o_start.valid | started) | (dut.more == (good & (words != 0))))
    bench.prove("the_checksum_begins_with_the_header", ~word | (dut.begins == (seen == 0)))
    known, held = Signal(), Signal.like(start.as_value())
    with m.If(moves(dut.o_start)):
        m.d.sync += [known.eq(1), held.eq(start)]
    with m.If(moves(dut.i_command)):
        m.d.sync += known.eq(0)
    bench.prove("the_start_stands", ~known | (start.as_value() == held))
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
    taken = (command.stream_bytes[3:] - words)[:29]
    bench.prove("inner_known", ~known | started | ~active)
    bench.prove("inner_words", ~active | (bench.probe("words", 29) == taken))
    bench.prove("inner_command", ~active | (bench.probe("command", 64) == command.as_value()))
    bench.prove("inner_number", ~active | (bench.probe("number", 3) == seen))
    bench.prove("inner_magic", (seen < 1) | (wrongs[0] == magic))
    bench.prove("inner_form", (seen != 1) | (wrongs[1] == form))
    bench.prove("inner_params", (seen < 2) | (wrongs[1] == (form | params)))
    bench.prove("inner_length", (seen < 3) | (wrongs[2] == length))
    bench.prove("inner_format", (seen < 1) | (start.value_format == text[48:50]))
    bench.prove("inner_pairs", (seen < 3) | (start.pairs == text[128:160]))
    bench.prove("inner_fault", ~(active & (judged | started)) | (start.fault == fault))
    bench.prove("inner_no_fault", ~active | judged | started | (start.fault == StreamFault.NONE))
    return bench
