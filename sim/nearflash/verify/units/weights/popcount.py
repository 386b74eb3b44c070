"""The counter of set bits: a proof for words of 64 bits and sections of up to 512; vectors of sections of all lengths.

The proof's harness sums the bits that the counter chose of a word, which are proven to be the right ones, by eights as
the counter does: sums do not depend on the order. Of the vectors, words of padding follow a section, of any contents.
"""

from typing import Any

import numpy as np
from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from numpy.typing import NDArray

from nearflash.gateware.weights.popcount import Counted, Popcount
from nearflash.sim.verilator.ports import words_from_integers
from nearflash.verify.mutants.target import Target
from nearflash.verify.proofs.harness import ProofHarness
from nearflash.verify.proofs.proof import Proof

__all__ = ["PROOF", "TARGET", "ObservedCount", "build_proof", "vectors"]

_PROOF_PORT_BITS, _PROOF_BITS_MAX = 64, 512
_LATENCY = Popcount.latency(_PROOF_PORT_BITS)


def build_proof(dut: Any = None) -> ProofHarness:
    """Prove the count of bits within the section since `begin`: how many count, and whether others are set."""
    dut = Popcount(_PROOF_PORT_BITS, _PROOF_BITS_MAX) if dut is None else dut
    harness = ProofHarness(dut)
    m = harness.m
    begin, enable, bits = harness.free(1, "begin"), harness.free(1, "enable"), harness.free(10, "bits")
    word, counted = harness.free(_PROOF_PORT_BITS, "word"), harness.free(Counted, "counted")
    m.d.comb += [dut.begin.eq(begin), dut.enable.eq(enable), dut.bits.eq(bits), dut.word.eq(word)]
    m.d.comb += dut.counted.eq(counted)
    rests = Signal(range(_LATENCY + 1), reset_less=True)  # cycles since the last word, at most so many
    m.d.sync += rests.eq(Mux(enable, 0, rests + (rests < _LATENCY)))
    begun = Signal()
    m.d.sync += begun.eq(begun | begin)
    harness.assume((bits <= _PROOF_BITS_MAX) & (counted <= 2))
    harness.assume(~begin | (~enable & (rests >= _LATENCY - 1)))
    harness.assume(~enable | begun)

    size, at = Signal(10), Signal(11)  # of the section; where in it the next word is, at its end where there is none
    there, chosen = Signal(_PROOF_PORT_BITS), Signal(_PROOF_PORT_BITS)  # of the word
    total, beyond = Signal(10), Signal()
    m.d.comb += [
        there.eq(Cat(at + k < size for k in range(_PROOF_PORT_BITS))),
        chosen.eq(_choose(word & there, counted)),
    ]
    more = [Signal(8, name="more")]  # of the word; of those in the tree
    inner = harness.probe("chosen", _PROOF_PORT_BITS)
    m.d.comb += more[0].eq(_sum([bit & enable for bit in inner]))
    for k in range(1, _LATENCY):
        more.append(Signal(8, name=f"more_{k}", reset_less=True))
        m.d.sync += more[k].eq(more[k - 1])
    late = Signal(10)
    m.d.sync += late.eq(late + more[-1])
    with m.If(enable):
        m.d.sync += [
            at.eq(Mux(at + _PROOF_PORT_BITS < size, at + _PROOF_PORT_BITS, size)),
            total.eq(total + more[0]),
            beyond.eq(beyond | (word & ~there).any()),
        ]
    with m.If(begin):
        m.d.sync += [size.eq(bits), at.eq(0), *(signal.eq(0) for signal in (total, late, beyond))]

    harness.prove("same_bits", inner == chosen)
    settled = begun & (rests >= _LATENCY - 1)
    harness.prove("count_of_all_words", ~settled | (dut.count == total))
    harness.prove("beyond_tells", ~settled | (dut.beyond == beyond))
    harness.cover("a_section_ends_within_a_word", settled & (size == 200) & (total == 200) & ~beyond)
    harness.cover("threes", settled & (counted == Counted.THREES_OF_2) & (size == 130) & (total == 65) & beyond)

    # Invariants: what of the words is in the tree and what is counted; which bits of the next word are of the section.
    left = Mux(begun, size - at, 0)[:10]
    harness.prove("inner_late", dut.count == late)
    for level in range(1, _LATENCY):
        sums = range(-(-_PROOF_PORT_BITS // 8**level))
        inside = [harness.probe(f"sum_{level}_{k}", min(1 + 3 * level, 8)) for k in sums]
        harness.prove(f"inner_level_{level}", _sum(inside) == more[level])
    harness.prove("inner_total", ~begun | ((late + sum(more[1:]))[: len(total)] == total))
    harness.prove("inner_rests", Cat((rests >= k) & (more[k] != 0) for k in range(1, _LATENCY)) == 0)
    harness.prove("inner_before", begun | ((size == 0) & (at == 0) & (dut.beyond == 0)))
    harness.prove("inner_at", (at == size) | ((at < size) & (at % _PROOF_PORT_BITS == 0)))
    harness.prove("inner_beyond", dut.beyond == beyond)
    harness.prove("inner_left", harness.probe("left", 10) == left)
    chunks = range(_PROOF_PORT_BITS // 64)
    harness.prove("inner_whole", harness.probe("whole", len(chunks)) == Cat(left[6:] > k for k in chunks))
    last = Cat((left[6:] == k) & left[:6].any() for k in chunks)
    harness.prove("inner_last", harness.probe("last", len(chunks)) == last)
    harness.prove("inner_tail", ~begun | (harness.probe("tail", 64) == Cat(size[:6] > k for k in range(64))))
    return harness


def _choose(ones: Any, counted: Any) -> Any:
    chosen = ones
    for what, step in ((Counted.THREES_OF_4, 4), (Counted.THREES_OF_2, 2)):
        lowest = sum(1 << k for k in range(0, _PROOF_PORT_BITS, step))
        chosen = Mux(counted == what, ones & (ones >> 1) & lowest, chosen)
    return chosen


def _sum(bits: Any) -> Any:
    summands = list(bits)
    while len(summands) > 1:
        summands = [sum(summands[k : k + 8]) for k in range(0, len(summands), 8)]
    return summands[0]


_PORT_BITS, _BITS_MAX = 128, 1024
_SECTIONS = 400
_FIELD_BITS = {Counted.ONES: 1, Counted.THREES_OF_4: 4, Counted.THREES_OF_2: 2}


class ObservedCount(wiring.Component):
    """Popcount as `inner`; its outputs are zero where they are not looked at."""

    LATENCY = 0

    def __init__(self) -> None:
        self.inner = Popcount(_PORT_BITS, _BITS_MAX)
        members = dict(self.inner.signature.members.items())
        outputs = {name: Out(members.pop(name).shape) for name in ("count", "beyond")}
        super().__init__({**members, "look": In(1), **outputs})

    def elaborate(self, platform: Any) -> Module:
        """Build it with the gates."""
        m = Module()
        m.submodules.inner = inner = self.inner
        for name in ("begin", "bits", "counted", "enable", "word"):
            m.d.comb += getattr(inner, name).eq(getattr(self, name))
        for name in ("count", "beyond"):
            m.d.comb += getattr(self, name).eq(Mux(self.look, getattr(inner, name), 0))
        return m


def vectors(rng: np.random.Generator) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """A row a cycle. What is not looked at (lengths, words without `enable`) is anything."""
    columns: dict[str, list[Any]] = {name: [] for name in ("begin", "bits", "counted", "enable", "look")}
    words, counts, latency = list[int](), list[tuple[int, int]](), Popcount.latency(_PORT_BITS)
    looked = (0, 0)

    def row(begin: int = 0, bits: int | None = None, word: int | None = None, look: int = 0) -> None:
        length = int(rng.integers(_BITS_MAX + 1)) if bits is None else bits
        for name, value in zip(columns, (begin, length, counted, word is not None, look), strict=True):
            columns[name].append(int(value))
        words.append(int.from_bytes(rng.bytes(_PORT_BITS // 8), "little") if word is None else word)
        counts.append(looked if look else (0, 0))

    counted = Counted.ONES
    for _ in range(latency):
        row()
    for _ in range(_SECTIONS):
        rests = int(rng.integers(3))
        begins_at_once, counted = rests == 0 and len(counts) > latency, Counted(int(rng.integers(3)))
        field = _FIELD_BITS[counted]
        size = int(rng.choice([0, 1, 2, 7, 16, 17, 31, 100, _BITS_MAX // field])) * field
        size = min(size if rng.integers(2) else int(rng.integers(_BITS_MAX // field + 1)) * field, _BITS_MAX)
        row(begin=1, bits=size, look=int(begins_at_once))
        every = rng.random(-(-size // 512) * 512 + int(rng.integers(2)) * _PORT_BITS) < rng.choice([0.1, 0.5, 1])
        if rng.integers(2):
            every[size:] = 0
            if len(every) > size and rng.integers(2):
                every[int(rng.integers(size, len(every)))] = 1
        text = np.packbits(every, bitorder="little").tobytes()
        for at in range(0, len(text), _PORT_BITS // 8):
            for _ in range(int(rng.integers(6)) // 4):
                row()
            row(word=int.from_bytes(text[at : at + _PORT_BITS // 8], "little"))
        lowest = every[:size].reshape(-1, field)[:, :2].all(axis=1)
        for _ in range(latency - 1):
            row()
        looked = int(lowest.sum()), int(every[size:].any())
        for _ in range(rests):
            row(look=1)
    inputs: dict[str, NDArray[Any]] = {name: np.array(values, np.uint16) for name, values in columns.items()}
    row_counts = np.array(counts)
    return inputs | {"word": words_from_integers(words, _PORT_BITS)}, {
        "count": row_counts[:, 0],
        "beyond": row_counts[:, 1],
    }


PROOF = Proof(build_proof, engine="induction", depth=1)
TARGET = Target(ObservedCount, vectors, part="inner", batches=5)
