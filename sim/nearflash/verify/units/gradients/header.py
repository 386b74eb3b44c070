"""The header check of Top-K streams: its proof; vectors of good headers, wrong bits and streams too short."""

from typing import Any

import numpy as np
from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import Out
from numpy.typing import NDArray

from nearflash.abi.crc import CRC_POLYNOMIAL, CRC_RESIDUE, crc32c
from nearflash.abi.errors import StreamError
from nearflash.abi.topk import (
    HEADER_BYTES,
    MAGIC,
    TILE_BITS,
    TILE_PARAMS,
    VERSION,
    WORD_BYTES,
    StreamFault,
    StreamHeader,
    ValueFormat,
)
from nearflash.gateware.coding.crc import Crc32c
from nearflash.gateware.gradients.header import HeaderCheck, TopKCommand
from nearflash.sim.verilator.ports import words_from_integers
from nearflash.verify.mutants.observed import gate
from nearflash.verify.mutants.target import Target
from nearflash.verify.proofs.harness import ProofHarness
from nearflash.verify.proofs.proof import Proof
from nearflash.verify.proofs.properties import accept, check_source, moves, offer

__all__ = ["PROOF", "TARGET", "ObservedHeader", "build_proof", "vectors"]


def build_proof(dut: Any = None) -> ProofHarness:
    """All words of a command are taken and no others, and one start reports what its header states or what is wrong."""
    dut = HeaderCheck() if dut is None else dut
    harness = ProofHarness(dut)
    m = harness.m
    offer(harness, dut.i_command, "i_command")
    offer(harness, dut.i)
    accept(harness, dut.o_start, "o_start")
    accept(harness, dut.o)
    check_source(harness, dut.o_start, "o_start")
    check_source(harness, dut.o)
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
    same = (start.pairs == text[128:160]) & (start.value_format == text[48:50])
    harness.prove("one_start_a_command", ~dut.o_start.valid | (active & ~started))
    harness.prove("start_behind_the_header", ~dut.o_start.valid | (seen == 4) | (words == 0))
    harness.prove("start_names_the_fault", ~dut.o_start.valid | (start.fault == fault))
    harness.prove("more_words_of_the_start", ~(dut.o_start.valid | started) | (dut.more == (good & (words != 0))))
    harness.prove("the_checksum_begins_with_the_header", ~word | (dut.begins == (seen == 0)))
    known, held = Signal(), Signal.like(start.as_value())
    with m.If(moves(dut.o_start)):
        m.d.sync += [known.eq(1), held.eq(start)]
    with m.If(moves(dut.i_command)):
        m.d.sync += known.eq(0)
    harness.prove("the_start_stands", ~known | (start.as_value() == held))
    harness.prove("start_has_the_params", ~dut.o_start.valid | (start.params == command.params))
    harness.prove("start_reports_the_header", ~(dut.o_start.valid & good) | same)
    harness.prove("no_word_of_another_command", ~dut.i.ready | (active & (words != 0)))
    harness.prove("words_pass_behind_a_good_header", dut.o.valid == (dut.i.valid & started & good & (words != 0)))
    harness.prove("words_pass_one_for_one", moves(dut.o) == (word & started & good))
    harness.prove("same_words", ~dut.o.valid | (dut.o.payload == dut.i.payload))
    harness.prove("next_command_when_all_were_taken", dut.i_command.ready == ~active)
    harness.prove("takes_the_header", ~active | started | (seen == 4) | (words == 0) | dut.i.ready)
    harness.prove("drops_behind_a_bad_header", ~started | good | (words == 0) | dut.i.ready)
    waits = harness.past(active & ~started & ((seen == 4) | (words == 0)), "judges")
    harness.prove("starts_in_time", ~waits | ~harness.past(waits, "judged") | dut.o_start.valid | started)
    harness.no_paths += [(dut.o.ready, dut.o_start.valid), (dut.i.valid, dut.i.ready)]
    example = int.from_bytes(StreamHeader(ValueFormat.FP16, 5, 2, 40).pack(), "little")
    harness.cover("a_good_header", moves(dut.o_start) & good & (text == example) & (words == 1))
    harness.cover("half_a_header", moves(dut.o_start) & (seen == 2))
    harness.cover("a_word_dropped", word & started & ~good & (seen == 4))

    # Invariants: what was seen outside decides the state, and what each word of the header left.
    state = harness.probe("fsm_state", 3)
    judged, wrongs = Signal(), [harness.probe(f"wrong.{name}", 1) for name in ("magic", "params", "length")]
    m.d.sync += judged.eq(active & ~started & ((seen == 4) | (words == 0)))
    expected = Mux(~active, 0, Mux(started, 4, Mux(judged, 3, Mux(seen == 4, 2, 1))))
    harness.prove("inner_state", state == expected)
    harness.prove("inner_seen", (seen <= 4) & (~(active & (judged | started)) | (seen == 4) | (words == 0)))
    harness.prove("inner_active", active | ~(judged | started))
    taken = (command.stream_bytes[3:] - words)[:29]
    harness.prove("inner_known", ~known | started | ~active)
    harness.prove("inner_words", ~active | (harness.probe("words", 29) == taken))
    harness.prove("inner_command", ~active | (harness.probe("command", 64) == command.as_value()))
    harness.prove("inner_number", ~active | (harness.probe("number", 3) == seen))
    harness.prove("inner_magic", (seen < 1) | (wrongs[0] == magic))
    harness.prove("inner_form", (seen != 1) | (wrongs[1] == form))
    harness.prove("inner_params", (seen < 2) | (wrongs[1] == (form | params)))
    harness.prove("inner_length", (seen < 3) | (wrongs[2] == length))
    harness.prove("inner_format", (seen < 1) | (start.value_format == text[48:50]))
    harness.prove("inner_pairs", (seen < 3) | (start.pairs == text[128:160]))
    harness.prove("inner_fault", ~(active & (judged | started)) | (start.fault == fault))
    harness.prove("inner_no_fault", ~active | judged | started | (start.fault == StreamFault.NONE))
    return harness


_COMMANDS = 120
_LONG, _RARELY = 1 << 17, 8
_START_BITS = 69
_CRC_AT = 8 * (HEADER_BYTES - 4)


class ObservedHeader(wiring.Component):
    """HeaderCheck as `inner`, with its checksum; a start with a fault reports nothing else.

    Words of `o` come with the start that stands.
    """

    def __init__(self) -> None:
        self._inner = HeaderCheck()
        streams = ("i_command", "i", "o_start")
        o = Out(stream.Signature(64 + _START_BITS))
        super().__init__({name: self._inner.signature.members[name] for name in streams} | {"o": o})

    def elaborate(self, platform: Any) -> Module:
        """Build it with the checksum of all words that it takes."""

        def start(payload: Any) -> Any:
            bits = Value.cast(payload)
            return Mux(payload.fault == StreamFault.NONE, bits, Cat(Const(0, len(bits) - 3), payload.fault))

        m = Module()
        m.submodules.inner = inner = self._inner
        m.submodules.crc = crc = Crc32c()
        for name in ("i_command", "i"):
            wiring.connect(m, wiring.flipped(getattr(self, name)), getattr(inner, name))
        gate(m, inner.o_start, self.o_start, start)
        gate(m, inner.o, self.o, lambda word: Cat(word, inner.o_start.payload))
        m.d.comb += [
            crc.enable.eq(self.i.valid & self.i.ready),
            crc.first.eq(inner.begins),
            crc.data.eq(self.i.payload),
            inner.crc.eq(crc.o),
        ]
        return m


def vectors(rng: np.random.Generator) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Commands of up to nine words behind the header; the last one has more than a run could bring.

    Now and then the first one has a bad header and so many words behind it that the upper bits of a count move.
    """
    commands, starts, words, passed = [], [], [], []
    if rng.integers(_RARELY) == 0:
        count = _LONG + int(rng.integers(_LONG))
        commands.append(_params(rng) | count * WORD_BYTES << 32)
        starts.append(StreamFault.HEADER << 66)
        words.append(rng.integers(0, 1 << 64, count, np.uint64))
    for number in range(_COMMANDS):
        params, stream_bytes = _params(rng), HEADER_BYTES + WORD_BYTES * int(rng.integers(10))
        if number == _COMMANDS - 1:
            stream_bytes = HEADER_BYTES + (1 << int(rng.integers(8, 29))) * WORD_BYTES
        header = StreamHeader(
            ValueFormat(int(rng.integers(len(ValueFormat)))), params, int(rng.integers(1 << 32)), stream_bytes
        )
        text = bytearray(header.pack())
        if number != _COMMANDS - 1:
            params, stream_bytes = _spoil(rng, text, params, stream_bytes)
        count = min(stream_bytes // WORD_BYTES, 24)
        body = rng.integers(0, 1 << 64, max(count - 4, 0), np.uint64)
        words.append(np.concatenate([np.frombuffer(text, "<u8"), body])[:count])
        commands.append(params | stream_bytes << 32)
        try:
            stated = StreamHeader.unpack(bytes(text), params, stream_bytes)
        except StreamError as error:
            starts.append(int(error.fault) << 66)
        else:
            starts.append(params | stated.pairs << 32 | stated.value_format << 64)
            passed += [word | starts[-1] << 64 for word in body.tolist()]
    inputs: dict[str, NDArray[Any]] = {"i_command": np.array(commands, np.uint64), "i": np.concatenate(words)}
    return inputs, {
        "o_start": words_from_integers(starts, _START_BITS),
        "o": words_from_integers(passed, 64 + _START_BITS),
    }


def _params(rng: np.random.Generator) -> int:
    """Choose a number of any size, or next to a multiple of a tile's."""
    some = int(rng.integers(1, 1 << int(rng.integers(1, 33))))
    return some if rng.integers(2) else max(min((some >> 12 << 12) + int(rng.integers(-1, 2)), (1 << 32) - 1), 1)


def _spoil(rng: np.random.Generator, text: bytearray, params: int, stream_bytes: int) -> tuple[int, int]:
    """Half of the headers stay good; parameters and bytes of the command."""
    kind, bit = int(rng.integers(10)), int(rng.integers(8 * HEADER_BYTES))
    if kind < 3:  # a bit, perhaps below a checksum that is right
        if kind < 2:
            bit %= _CRC_AT
        text[bit // 8] ^= 1 << bit % 8
        if kind < 2:
            text[_CRC_AT // 8 :] = crc32c(bytes(text[: _CRC_AT // 8])).to_bytes(4, "little")
    elif kind == 3:
        text[_CRC_AT // 8 :] = _checksum(bytes(text[: _CRC_AT // 8]), CRC_RESIDUE ^ 1 << bit % 32)
    elif kind == 4:
        stream_bytes = int(rng.integers(HEADER_BYTES + WORD_BYTES))
    elif kind == 5:
        params = max(params ^ 1 << int(rng.integers(32)), 1)
    return params, stream_bytes


def _checksum(text: bytes, crc: int) -> bytes:
    """Compute what gives `text` this CRC when written behind it: the register that is to be there, 32 steps back."""
    register = ~crc & 0xFFFFFFFF
    for _ in range(32):
        register = (register ^ CRC_POLYNOMIAL) << 1 | 1 if register >> 31 else register << 1
    return (register ^ ~crc32c(text) & 0xFFFFFFFF).to_bytes(4, "little")


PROOF = Proof(build_proof, engine="induction", depth=3)
TARGET = Target(
    ObservedHeader, vectors, part="inner", stalls=("none", "both"), batches=40, cut_cycles=(3, 5, 9, 20, 33)
)
