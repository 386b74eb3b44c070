"""What the tests of the attend kernel's numbers share: the Verilated unit, fp16 operands, integers of wide ports."""

import numpy as np
import pytest

from nearflash.abi.formats import FP16
from nearflash.sim.verilator.burst import BurstUnit
from nearflash.sim.verilator.ports import integers_from_words
from nearflash.verify.fixtures.vectors import corner_values


@pytest.fixture(scope="session")
def num_unit():
    """The Verilated component, by its lower-case class name."""

    def build(component, suffix=""):
        return BurstUnit(component, f"num_{type(component).__name__.lower()}{suffix}")

    return build


@pytest.fixture(scope="session")
def fp16_bits():
    """Patterns of `count` finite fp16 values: half corners (zeros, subnormals, largest, runs), half any pattern."""
    corners = corner_values(FP16).astype(np.uint16)
    corners = corners[np.isfinite(corners.view(np.float16))]

    def draw(count, seed):
        rng = np.random.default_rng(seed)
        anything = rng.integers(0, 1 << 16, count, dtype=np.uint16)
        anything = np.where(np.isfinite(anything.view(np.float16)), anything, anything ^ np.uint16(0x4000))
        return np.where(rng.integers(0, 2, count) == 0, rng.choice(corners, count), anything)

    return draw


@pytest.fixture(scope="session")
def signed_integers():
    """Python integers of a wide port's words, in two's complement of `bits`."""

    def read(words, bits):
        values = np.array(integers_from_words(words), object)
        return (values + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)

    return read
