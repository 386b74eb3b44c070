"""The packer: a proof for groups of two lanes and words of 64 bits; vectors of groups of any lanes.

Of the vectors' groups all bytes count, or the lanes' low ones; the last word is not filled.
"""

from typing import Any

import numpy as np
from amaranth.hdl import Cat, Mux, Signal
from numpy.typing import NDArray

from nearflash.gateware.weights.pack import LanePack
from nearflash.verify.mutants.observed import ObservedStreams
from nearflash.verify.mutants.target import Target
from nearflash.verify.proofs.harness import ProofHarness
from nearflash.verify.proofs.proof import Proof
from nearflash.verify.proofs.properties import accept, check_source, moves, offer

__all__ = ["PROOF", "TARGET", "build_proof", "component", "vectors"]

_PROOF_WIDTH, _PROOF_PORT_BITS = 2, 64
_PLACES = _PROOF_PORT_BITS // (8 * _PROOF_WIDTH)
"""Of a word: half as many lanes of 16 bits as of bytes fill one."""


def build_proof(dut: Any = None) -> ProofHarness:
    """Each word is the groups since the word before, shifted in from above, so that the first one ends up lowest."""
    dut = LanePack(_PROOF_WIDTH, _PROOF_PORT_BITS) if dut is None else dut
    harness = ProofHarness(dut)
    offer(harness, dut.i)
    accept(harness, dut.o)
    check_source(harness, dut.o)
    narrow = harness.free(1, "narrow")
    text, places, full = Signal(_PROOF_PORT_BITS), Signal(range(_PLACES)), Signal()
    group, lanes = moves(dut.i), [dut.i.payload.word_select(lane, 16) for lane in range(_PROOF_WIDTH)]
    harness.m.d.comb += dut.narrow.eq(narrow)
    harness.assume((places == 0) | (narrow == harness.past(narrow, "narrow_past")))

    filled = places + Mux(narrow, 1, 2)
    ends = group & (filled == _PLACES)
    harness.m.d.sync += full.eq(ends | (full & ~dut.o.ready))
    with harness.m.If(group):
        harness.m.d.sync += [
            places.eq(Mux(ends, 0, filled)),
            text.eq(Mux(narrow, Cat(text, *(lane[:8] for lane in lanes))[-_PROOF_PORT_BITS:], Cat(text, *lanes)[32:])),
        ]
    harness.prove("a_word_when_complete", dut.o.valid == full)
    harness.prove("same_bytes", ~dut.o.valid | (dut.o.payload == text))
    harness.prove("takes_a_group_when_there_is_room", dut.i.ready == (dut.o.ready | ~full))
    harness.prove("empty_after_reset", ~harness.was_reset | ~dut.o.valid)
    harness.no_paths += [(dut.i.valid, dut.o.valid), (dut.i.valid, dut.i.ready)]
    changed = harness.past(moves(dut.o) & narrow, "narrow_before") & ~narrow
    harness.cover("bytes", moves(dut.o) & narrow & (dut.o.payload == 0x0706050403020100))
    harness.cover("lanes_behind_bytes", changed & group)
    harness.cover("a_word_moves_with_a_group", moves(dut.o) & group)

    # Invariants: what has come of a word lies in its low places, and at the top of `text`.
    harness.prove("inner_place", harness.probe("place", 2) == places)
    harness.prove("inner_pair", narrow | (places[0] == 0))
    harness.prove("inner_whole", ~full | (places == 0))
    for count in range(1, _PLACES):
        bits = count * 8 * _PROOF_WIDTH
        harness.prove(f"inner_bytes_{count}", (places != count) | (dut.o.payload[:bits] == text[-bits:]))
    return harness


_WIDTH, _PORT_BITS = 4, 128
_GROUPS = 301


def component() -> ObservedStreams:
    """Make packers of two or four groups a word."""
    return ObservedStreams(LanePack(_WIDTH, _PORT_BITS))


def vectors(rng: np.random.Generator) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Groups of one kind."""
    lanes, narrow = rng.integers(0, 1 << 16, (_GROUPS, _WIDTH), np.uint16), int(rng.integers(2))
    text = (lanes & 0xFF).astype(np.uint8).tobytes() if narrow else lanes.tobytes()
    words = np.frombuffer(text[: len(text) // 16 * 16], "<u4").reshape(-1, _PORT_BITS // 32)
    return {"i": lanes.view("<u8")[:, 0], "narrow": np.array(narrow)}, {"o": words}


PROOF = Proof(build_proof, engine="induction", depth=2)
TARGET = Target(component, vectors, part="inner", stalls=("none", "both"), batches=12, cut_cycles=(9, 20, 33))
