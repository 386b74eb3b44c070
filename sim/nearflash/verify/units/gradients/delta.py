"""The delta packer: a bounded proof of a delta of two small tiles; vectors of deltas of one to three tiles."""

from typing import Any

import numpy as np
from amaranth.hdl import Module, Mux, ResetSignal, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out
from numpy.typing import NDArray

from nearflash.abi.delta import DENSE_ABOVE
from nearflash.abi.topk import HEADER_BYTES, TILE_PARAMS, WORD_BYTES, ValueFormat
from nearflash.gateware.gradients.delta import DeltaCommand, DeltaPacker, DeltaPart
from nearflash.model.gradients.delta import delta_of
from nearflash.sim.verilator.ports import words_from_integers
from nearflash.verify.mutants.observed import gate
from nearflash.verify.mutants.target import Target
from nearflash.verify.proofs.harness import ProofHarness
from nearflash.verify.proofs.proof import Proof
from nearflash.verify.proofs.properties import moves

__all__ = ["PROOF", "RUN_CYCLES", "TARGET", "ObservedPacker", "build_proof", "vectors"]

RUN_CYCLES = 45
"""From the reset to the end of the delta, at most: what a bounded proof has to cover."""
_TILE_BITS, _PROOF_LANES = 4, 4
_PROOF_TILE = 1 << _TILE_BITS
_PROOF_PARAMS = _PROOF_TILE + _PROOF_LANES


def build_proof(dut: Any = None) -> ProofHarness:
    """A delta of up to 20 parameters in tiles of 16, after a reset, with no stalls: a run of RUN_CYCLES at most.

    A tile states as many words as changed, or all of them where that is more than a quarter; its indices rise; and any
    one parameter is among them, its new word in the same place of the words, if and only if it changed.
    """
    dut = DeltaPacker(_PROOF_LANES, _TILE_BITS) if dut is None else dut
    harness = ProofHarness(dut)
    m = harness.m
    params, commanded = Signal(range(_PROOF_PARAMS + 1), init=1), Signal()
    for name in ("o", "o_command"):
        m.d.comb += getattr(dut, name).ready.eq(1)
    # Words are compared and moved, whatever they are: of those that change each is another one.
    place, flips = Signal(range(_PROOF_PARAMS + 1)), harness.free(_PROOF_LANES, "flips")
    m.d.comb += dut.i.valid.eq(1)
    for lane, new in enumerate(dut.i.payload.new):
        m.d.comb += new.eq(Mux(flips[lane], place + lane + 1, 0))
    harness.assume(ResetSignal() == 0)
    harness.assume((params != 0) & (params <= _PROOF_PARAMS))
    m.d.comb += [dut.i_command.valid.eq(~commanded & ~harness.was_reset), dut.i_command.payload.params.eq(params)]
    with m.If(moves(dut.i_command)):
        m.d.sync += commanded.eq(1)
    with m.If(harness.was_reset):
        m.d.sync += params.eq(harness.free(len(params), "params_choice"))
    mark = Signal(range(_PROOF_PARAMS))  # any parameter
    with m.If(harness.was_reset):
        m.d.sync += mark.eq(harness.free(len(mark), "mark_choice"))

    # What went in: how many changed of each tile, and what the marked parameter became.
    counts = [Signal(_TILE_BITS + 1, name=f"count_{n}") for n in range(2)]
    changed, became = Signal(), Signal(16)
    m.d.comb += dut.i.payload.last.eq(place + _PROOF_LANES >= params)
    group = [(place + lane, dut.i.payload.old[lane], dut.i.payload.new[lane]) for lane in range(_PROOF_LANES)]
    with m.If(moves(dut.i)):
        m.d.sync += place.eq(place + _PROOF_LANES)
        differ = sum((old != new) & (at < params) for at, old, new in group)
        for number, count in enumerate(counts):
            with m.If(place[_TILE_BITS:] == number):
                m.d.sync += count.eq(count + differ)
        for at, old, new in group:
            with m.If((at == mark) & (at < params)):
                m.d.sync += [changed.eq(old != new), became.eq(new)]
    harness.prove("no_group_of_another_command", ~moves(dut.i) | (place < params))

    _check_output(harness, dut, (counts, mark, changed, became))
    return harness


def _check_output(harness: ProofHarness, dut: Any, expected: tuple[Any, ...]) -> None:
    """Assert what comes out, as it comes: commands, tile words, indices and words."""
    m, word, part = harness.m, dut.o.payload, dut.o_command.payload
    counts, mark, changed, became = expected
    params = dut.i_command.payload.params[: len(mark) + 1]
    tile, left, at, ended = Signal(2), Signal(8), Signal(_TILE_BITS), Signal()  # words left of a part; the word of it
    values, dense, indices = Signal(_TILE_BITS + 1), Signal(), Signal(_TILE_BITS)  # stated; and words of indices
    total, first, age = Signal(8), Signal(8), Signal(range(RUN_CYCLES + 1))
    m.d.sync += age.eq(age + (age != RUN_CYCLES))
    tiles = (params + (_PROOF_TILE - 1)) >> _TILE_BITS
    of_header = tile == tiles
    size = Mux((tile + 1 == tiles) & (params[:_TILE_BITS] != 0), params[:_TILE_BITS], _PROOF_TILE)
    count = Mux(tile[0], counts[1], counts[0])
    is_dense = count * DENSE_ABOVE > size
    stated = Mux(is_dense, size, count)
    sections = (stated + 3) >> 2
    with m.If(moves(dut.o_command)):
        m.d.sync += [left.eq(part.words), at.eq(0)]
    harness.prove("a_command_when_the_part_before_is_out", ~dut.o_command.valid | (left == 0))
    harness.prove("a_word_of_a_part", ~dut.o.valid | (left != 0))
    here = dut.o_command.valid & ~of_header
    harness.prove("words_of_a_tile", ~here | (part.words == 1 + Mux(is_dense, sections, sections << 1)))
    harness.prove("tiles_follow_each_other", ~here | (part.first == HEADER_BYTES // WORD_BYTES + first))
    last = dut.o_command.valid & of_header
    harness.prove("states_the_last", ~dut.o_command.valid | (part.last == (tile + 1 >= tiles)))
    harness.prove("the_header_comes_first", ~last | ((part.first == 0) & (part.words == HEADER_BYTES // WORD_BYTES)))

    moved = moves(dut.o)
    tile_word = moved & ~of_header & (at == 0)
    harness.prove("states_what_changed", ~tile_word | ((word[:16] == stated) & (word[16:32] == is_dense)))
    with m.If(moved):
        m.d.sync += [left.eq(left - 1), at.eq(at + 1)]
        with m.If(tile_word):
            m.d.sync += [values.eq(word), dense.eq(word[16]), indices.eq(Mux(word[16], 0, (word[:5] + 3) >> 2))]
            m.d.sync += [total.eq(total + word[:8]), first.eq(first + left)]
        with m.If((left == 1) & ~of_header):
            m.d.sync += tile.eq(tile + 1)
        with m.If((left == 1) & of_header):
            m.d.sync += ended.eq(1)
    harness.prove("states_the_total", ~(moved & of_header & (at == 2)) | (word[:32] == total))
    harness.prove("states_the_bytes", ~(moved & of_header & (at == 2)) | (word[32:] == HEADER_BYTES + (first << 3)))
    harness.prove("ends", ended | (age != RUN_CYCLES))
    harness.prove("idle_when_all_was_taken", ~ended | dut.idle)

    # Entries: four of a word.
    in_indices = moved & ~of_header & (at != 0) & (at <= indices)
    entry = Mux(in_indices, at - 1, at - 1 - indices)[:_TILE_BITS] << 2
    before, some = Signal(16), Signal()
    ours = tile == mark[_TILE_BITS:]
    found, rank, wrong = Signal(), Signal(_TILE_BITS), Signal()
    with m.If(tile_word):
        m.d.sync += [some.eq(0), found.eq(word[16]), rank.eq(mark)]
        with m.If(ours):
            m.d.sync += wrong.eq(0)
    then, known = before, some
    for lane in range(4):
        element = word.word_select(lane, 16)
        there = (entry + lane)[: _TILE_BITS + 1] < values
        harness.prove(f"indices_rise_{lane}", ~(in_indices & there & known) | (element > then))
        harness.prove(f"index_in_the_tile_{lane}", ~(in_indices & there) | (element < size))
        padding = moved & ~of_header & (at != 0) & ~there
        harness.prove(f"padding_is_zero_{lane}", ~padding | (element == 0))
        then, known = element, in_indices
        with m.If(in_indices & there & ours & (element == mark[:_TILE_BITS])):
            m.d.sync += [found.eq(1), rank.eq(entry + lane)]
        of_mark = moved & ~of_header & (at > indices) & ours & found & (changed | dense)
        with m.If(of_mark & there & (entry + lane == rank[:_TILE_BITS])):
            m.d.sync += wrong.eq(element != became)
    with m.If(in_indices):
        m.d.sync += [before.eq(word[48:]), some.eq(1)]
    done = harness.past(moved & ~of_header & ours & (left == 1), "tile_done") & (mark < params)
    harness.prove("an_entry_if_it_changed", ~done | dense | (found == changed))
    harness.prove("with_its_new_word", ~done | ~found | ~wrong)
    harness.cover("a_dense_tile_behind_one_of_pairs", ended & (total == 7))
    harness.cover("a_delta_of_nothing", ended & (total == 0) & (tile == 2))


_COMMANDS = 40
_LANES = 4
_GROUP_BITS = 32 * _LANES + 1


class ObservedPacker(wiring.Component):
    """DeltaPacker as `inner`, its command held until it is idle; payloads without an item are zero."""

    def __init__(self) -> None:
        self._inner = DeltaPacker(_LANES)
        super().__init__({
            "i_command": In(stream.Signature(DeltaCommand)),
            "i": self._inner.signature.members["i"],
            "o_command": Out(stream.Signature(DeltaPart)),
            "o": Out(stream.Signature(64)),
        })  # fmt: skip

    def elaborate(self, platform: Any) -> Module:
        """Build it with the register of the command."""
        m = Module()
        m.submodules.inner = inner = self._inner
        held = Signal(DeltaCommand)
        wiring.connect(m, wiring.flipped(self.i), inner.i)
        gate(m, inner.o_command, self.o_command)
        gate(m, inner.o, self.o)
        given = self.i_command.payload.as_value()
        m.d.comb += [
            inner.i_command.valid.eq(self.i_command.valid),
            inner.i_command.payload.eq(Mux(inner.idle, given, held.as_value())),
            self.i_command.ready.eq(inner.i_command.ready),
        ]
        with m.If(self.i_command.valid & self.i_command.ready):
            m.d.sync += held.eq(self.i_command.payload)
        return m


def vectors(rng: np.random.Generator) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Deltas of a few parameters, and of one to three tiles; of none, few, about a quarter, and all changed."""
    commands, groups, parts, words = [], [], [], []
    for number in range(_COMMANDS):
        params = int(rng.integers(1, 64))
        if number % 8 == 0:
            params = TILE_PARAMS * int(rng.integers(0, 3)) + int(
                rng.choice([1, 2, 3, 4, 17, TILE_PARAMS - 1, TILE_PARAMS])
            )
        form = ValueFormat(int(rng.choice([ValueFormat.FP16, ValueFormat.BF16])))
        old, new = _words(rng, params)
        commands.append(params | int(form) << 32)
        groups += _groups(rng, old, new)
        delta = np.frombuffer(delta_of(old.tolist(), new.tolist(), form), "<u8")
        places = _places(delta, -(-params // TILE_PARAMS))
        parts += [first | size << 32 | (n >= len(places) - 2) << 48 for n, (first, size) in enumerate(places)]
        words += [delta[first : first + size] for first, size in places]
    inputs: dict[str, NDArray[Any]] = {
        "i_command": np.array(commands, np.uint64),
        "i": words_from_integers(groups, _GROUP_BITS),
    }
    return inputs, {"o_command": np.array(parts, np.uint64), "o": np.concatenate(words)}


def _words(rng: np.random.Generator, params: int) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """Old and new words, which differ in a bit, or in any."""
    old = rng.integers(0, 1 << 16, params, np.uint16)
    tiles = -(-params // TILE_PARAMS)
    shares = np.repeat(rng.choice([0, 0.01, 0.1, 0.245, 0.25, 0.255, 0.5, 1], tiles), TILE_PARAMS)[:params]
    flips = 1 << rng.integers(0, 16, params) if rng.integers(2) else rng.integers(1, 1 << 16, params)
    new: NDArray[np.uint16] = np.bitwise_xor(old, np.where(rng.random(params) < shares, flips, 0).astype(np.uint16))
    for first in range(0, params, TILE_PARAMS):  # as many as a list has, and one more
        size = min(TILE_PARAMS, params - first)
        if rng.integers(4) == 0:
            count = size // DENSE_ABOVE + int(rng.integers(2))
            places = first + rng.permutation(size)[: min(count, size)]
            new[first : first + size] = old[first : first + size]
            new[places] ^= np.uint16(1) << rng.integers(0, 16, len(places)).astype(np.uint16)
    return old, new


def _groups(rng: np.random.Generator, old: NDArray[np.uint16], new: NDArray[np.uint16]) -> list[int]:
    """Groups as integers; lanes past the parameters hold anything."""
    spare = -len(old) % _LANES
    pair = [np.append(words, rng.integers(0, 1 << 16, spare, np.uint16)).reshape(-1, _LANES) for words in (old, new)]
    rows = np.concatenate(pair, axis=1).astype("<u2")
    groups = [int.from_bytes(row.tobytes(), "little") for row in rows]
    groups[-1] |= 1 << 32 * _LANES
    return groups


def _places(delta: NDArray[np.uint64], tiles: int) -> list[tuple[int, int]]:
    """First word and words of each part, in the order in which they come: the header last."""
    at, places = HEADER_BYTES // WORD_BYTES, []
    for _ in range(tiles):
        head = int(delta[at]) & 0xFFFFFFFF
        sections = -(-(head & 0xFFFF) // 4) * (1 if head >> 16 else 2)
        places.append((at, 1 + sections))
        at += 1 + sections
    return [*places, (0, HEADER_BYTES // WORD_BYTES)]


PROOF = Proof(build_proof, engine="bounded", depth=RUN_CYCLES + 2, cover_depth=RUN_CYCLES)
TARGET = Target(ObservedPacker, vectors, part="inner", stalls=("none", "both"), batches=6, cut_cycles=(5, 40, 700))
