"""The radix selector: a bounded proof of small selections; vectors of selections by count and by mass."""

from typing import Any

import numpy as np
from amaranth.hdl import Mux, ResetSignal, Signal
from numpy.typing import NDArray

from nearflash.abi.attention.fixed_point import KEY_LOCAL
from nearflash.gateware.attention.engine.interfaces import TOKEN_BITS
from nearflash.gateware.attention.select.select import RadixSelector
from nearflash.model.attention.select.select import select, select_mass
from nearflash.model.attention.select.selection import probability_keys, weights
from nearflash.sim.verilator.ports import words_from_integers
from nearflash.verify.mutants.target import Target
from nearflash.verify.proofs.harness import ProofHarness
from nearflash.verify.proofs.proof import Proof
from nearflash.verify.proofs.properties import accept, moves, offer

__all__ = ["PROOF", "RUN_CYCLES", "TARGET", "build_proof", "component", "vectors"]

RUN_CYCLES = 56
"""From the reset to the end of the selection, at most: what a bounded proof has to cover."""

_LANES, _BEATS, _KEY_BITS = 4, 2, 2


def build_proof() -> ProofHarness:
    """Up to eight keys of two bits, in one selection after a reset, with no stalls: a run of RUN_CYCLES at most.

    What is marked is counted; and of any two entries, `early` and `late`, the one with the larger key is marked first,
    of equals the early one. Both together say which entries are marked.
    """
    dut = RadixSelector(_LANES * _BEATS, key_bits=_KEY_BITS)
    harness = ProofHarness(dut)
    m = harness.m
    offer(harness, dut.i)
    offer(harness, dut.i_command, "i_command")
    accept(harness, dut.o)
    age, ended = Signal(range(RUN_CYCLES + 1)), Signal()
    m.d.sync += age.eq(age + (age != RUN_CYCLES))
    harness.assume(ResetSignal() == 0)
    harness.assume(dut.i.valid & dut.o.ready)

    beats, count, entries, commanded = Signal(2), Signal(4), Signal(4), Signal()
    final = dut.i.payload.last
    harness.assume(dut.i.payload.local == 0)
    harness.assume((dut.i.payload.valid & (dut.i.payload.valid + 1)) == 0)
    harness.assume(dut.i.payload.valid.any() & (final | dut.i.payload.valid.all()))
    harness.assume(final | (beats != _BEATS - 1))
    harness.assume(dut.i_command.valid == ~commanded)
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
    harness.prove("ends", ended | (age != RUN_CYCLES))
    harness.prove("marks_the_count", ~ends | (total == Mux(count < entries, count, entries)))
    harness.prove("last_with_the_last_keys", ~dut.o.valid | (dut.o.payload.last == (out + 1 == beats)))

    early, late = Signal(3), Signal(3)
    with m.If(harness.was_reset):
        m.d.sync += [early.eq(harness.free(3, "early_choice")), late.eq(harness.free(3, "late_choice"))]
    found = []
    for place in (early, late):
        key, mark = Signal(_KEY_BITS), Signal()
        with m.If(moves(dut.i) & (beats == place[2:])):
            m.d.sync += key.eq(dut.i.payload.keys[place[:2]])
        with m.If(moves(dut.o) & (out == place[2:])):
            m.d.sync += mark.eq(dut.o.payload.mask.bit_select(place[:2], 1))
        found.append((key, mark))
    (early_key, early_mark), (late_key, late_mark) = found
    done = harness.past(ends, "done") & (early < late) & (late < entries)
    harness.prove("late_only_if_larger", ~done | early_mark | ~late_mark | (late_key > early_key))
    harness.prove("early_only_if_not_smaller", ~done | late_mark | ~early_mark | (early_key >= late_key))
    harness.prove("nothing_beyond", ~harness.past(ends, "ended") | ~(late_mark & (late >= entries)))
    harness.cover("some_of_two_beats", ends & (beats == 2) & (total == 3))
    return harness


_ENTRIES, _SELECTIONS = 64, 100
_BEAT_BITS = 4 * 16 + 4 + 4 + 1
_LARGEST = 2047 << 17
"""Largest sum of probabilities that fp16 can hold (times 2^12)."""
_Summed = NDArray[np.int64]


def component() -> RadixSelector:
    """A small selector of the kind that attention uses."""
    return RadixSelector(_ENTRIES, weighted=True)


def vectors(rng: np.random.Generator) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Selections of 1 to 64 entries, alternately by count of any keys and by mass of summed probabilities."""
    commands: list[int] = []
    beats: list[int] = []
    masks: list[int] = []
    for number in range(_SELECTIONS):
        size = _ENTRIES if rng.integers(2) else int(rng.integers(1, _ENTRIES + 1))
        local = size - min(int(rng.choice([0, 0, 1, 5])), size)
        if number % 2:
            summed = _random_sums(rng, size)
            mass = _mass(rng, summed)
            count = _ENTRIES if rng.integers(4) else int(rng.integers(0, size + 3))
            keys = probability_keys(summed)
            chosen = _with_local(keys, local)
            mask = select_mass(chosen, weights(summed), mass, count)
        else:
            keys, count, mass = _keys(rng, size), _count(rng, size), 0
            chosen = _with_local(keys, local)
            mask = select(chosen, count)
        commands.append(count | mass << TOKEN_BITS)
        beats += _beats(rng, keys, local)
        bits = np.concatenate([mask, np.zeros(-size % 4, bool)]).reshape(-1, 4) @ (1, 2, 4, 8)
        masks += [*bits[:-1].tolist(), int(bits[-1]) | 1 << 4]
    inputs: dict[str, NDArray[Any]] = {"i_command": np.array(commands, np.uint64)}
    return inputs | {"i": words_from_integers(beats, _BEAT_BITS)}, {"o": np.array(masks, np.uint8)}


def _with_local(keys: NDArray[np.uint16], local: int) -> NDArray[np.uint16]:
    return np.where(np.arange(len(keys)) >= local, np.uint16(KEY_LOCAL), keys)


def _count(rng: np.random.Generator, size: int) -> int:
    """None; about as many as there are; any; far more."""
    kind = rng.integers(4)
    if kind == 0:
        return int(rng.integers(3))
    if kind == 1:
        return max(size + int(rng.integers(-2, 3)), 0)
    return int(rng.integers(size + 1)) if kind == 2 else (1 << int(rng.integers(6, TOKEN_BITS))) + int(rng.integers(2))


def _keys(rng: np.random.Generator, size: int) -> NDArray[np.uint16]:
    """Any keys; few different ones; a digit in common; all equal; runs of equal ones; ones and zeros; large ones.

    Local entries go ahead of the large ones, whatever key they came with.
    """
    some = rng.integers(0, 1 << 16, size).astype(np.uint16)
    digit, key = int(rng.integers(256)), rng.integers(0, 1 << 16, dtype=np.uint16)
    kinds = [
        some,
        rng.choice(some, size),
        rng.choice(some[:3], size),
        some & 0xFF | digit << 8,
        some & 0xFF00 | digit,
        np.full(size, key),
        np.repeat(some, 1 + int(rng.integers(8)))[:size],
        rng.choice(np.array([0, 0xFF, 0xFF00, 0xFFFF], np.uint16), size),
        key ^ np.uint16(1) << rng.integers(0, 16, size).astype(np.uint16),
        rng.integers(0xFE00, 1 << 16, size),
    ]
    return np.asarray(kinds[rng.integers(len(kinds))], np.uint16)


def _random_sums(rng: np.random.Generator, size: int) -> _Summed:
    """Summed probabilities, not all zero.

    Small numbers, or of 11 bits, times a power of two (their keys are exact); long-tailed; nearly equal; the largest.
    """
    kind = rng.integers(6)
    if kind < 4:
        bits = int(rng.choice([1, 3, 6, 9, 11, 11]))
        some = rng.integers(0, 1 << bits, size)
        some[rng.integers(size)] |= 1
        return some << int(rng.integers(29 - bits))
    if kind == 4:
        return np.minimum(2.0 ** rng.normal(rng.integers(30), 5, size), _LARGEST - 1).astype(np.int64) + 1
    if rng.integers(2):
        return (1 << rng.integers(12, 27)) + rng.integers(0, 5000, size)
    return np.where(rng.integers(0, 4, size) > 0, _LARGEST, rng.integers(1, 4))


def _mass(rng: np.random.Generator, summed: _Summed) -> int:
    """A mass that the weights of all entries above some key reach, or miss, by as little as there is; or any."""
    found, entries = np.unique(weights(summed), return_counts=True)
    reached = np.cumsum((found * entries)[::-1])
    if rng.integers(8) == 0 or len(found) == 1:
        return int(rng.integers(1, 1 << 16))
    mass, gap = np.divmod(reached[:-1] << 16, reached[-1])
    misses = int(rng.integers(2))
    closest = np.argsort(-gap if misses else gap)[: 1 + int(rng.integers(4))]
    return int(np.clip(mass[rng.choice(closest)] + misses, 1, (1 << 16) - 1))


def _beats(rng: np.random.Generator, keys: NDArray[np.uint16], local: int) -> list[int]:
    """Key beats as integers; lanes beyond the keys hold anything."""
    beats = []
    noise = rng.integers(0, 1 << 16, -len(keys) % 4, dtype=np.uint16)
    for start, four in enumerate(np.concatenate([keys, noise]).reshape(-1, 4).tolist()):
        count = min(len(keys) - 4 * start, 4)
        flags = sum(1 << lane for lane in range(4) if 4 * start + lane >= local)
        bits = sum(key << 16 * lane for lane, key in enumerate(four)) | flags << 64
        beats.append(bits | (1 << count) - 1 << 68 | (4 * start + 4 >= len(keys)) << 72)
    return beats


PROOF = Proof(build_proof, engine="bounded", depth=RUN_CYCLES + 2, cover_depth=RUN_CYCLES)
TARGET = Target(component, vectors, stalls=("none", "both"), batches=20)
