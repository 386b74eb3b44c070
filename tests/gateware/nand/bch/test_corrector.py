from functools import reduce
from operator import xor

import numpy as np
import pytest

from nearflash.gateware.nand.bch.corrector import Corrector
from nearflash.gateware.nand.bch.field import coordinates
from nearflash.sim.pysim.harness import run_streams, transfer_cycles

COORDINATES = {i: coordinates(i) for i in range(1, 32, 2)}


def beats(errors: list[int]) -> list[int]:
    """The syndromes of a codeword with these wrong bits, as Syndromes gives them."""
    odd = [reduce(xor, (COORDINATES[i][4415 - bit] for bit in errors)) for i in range(1, 32, 2)]
    return [sum(odd[4 * beat + k] << 13 * k for k in range(4)) for beat in range(4)]


def items(errors: list[int]) -> list[dict[str, int]]:
    """What the corrector answers."""
    if len(errors) > 16:
        return [{"position": None, "last": 1, "uncorrectable": 1}]
    return [{"position": bit, "last": bit == max(errors), "uncorrectable": 0} for bit in sorted(errors)]


def check(patterns: list[list[int]], stalls: str = "none") -> None:
    expected = [item for errors in patterns for item in items(errors)]
    given = [beat for errors in patterns for beat in beats(errors)]
    found = run_streams(Corrector(), {"i": given}, {"o": len(expected)}, stalls=stalls, timeout_cycles=200_000)["o"]
    for item, wanted in zip(found, expected, strict=True):
        assert (item.last, item.uncorrectable) == (wanted["last"], wanted["uncorrectable"])
        assert wanted["position"] in (None, item.position)


@pytest.mark.parametrize("stalls", ["none", "both"])
def test_errors_anywhere(stalls):
    rng = np.random.default_rng(1)
    counts = (1, 16, 17) if stalls == "none" else (3,)
    check([rng.choice(4400, count, replace=False).tolist() for count in counts], stalls)


def test_cycles():
    """What the docstrings of KeyEquation and RootSearch say."""
    for errors, longest in (([0], 690), ([4399], 150)):
        cycles = transfer_cycles(Corrector(), {"i": beats(errors)}, {"o": len(errors)})
        assert longest - 40 < cycles["o"][0] - cycles["i"][0] <= longest
