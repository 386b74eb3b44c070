import numpy as np
import pytest

from nearflash.gateware.num.add import ExactAdd
from nearflash.gateware.num.product import PRODUCT_BITS
from nearflash.sim.ports import words_from_integers

BITS = 98


@pytest.fixture(scope="module")
def unit(num_unit):
    return num_unit(ExactAdd())


def test_adds(unit, signed_integers):
    rng = np.random.default_rng(1)
    largest = (1 << PRODUCT_BITS) - 1
    edges = [0, 1, -1, (1 << 49) - 1, 1 << 49, -(1 << 49), largest, -largest]
    sums = [int.from_bytes(rng.bytes(12), "little", signed=True) << 1 | 1 for _ in range(4_000)]
    terms = [int(rng.choice([-1, 1])) * int.from_bytes(rng.bytes(10), "little") for _ in sums]
    sums += [a for a in edges for _ in edges] + [(1 << 97) - 1]
    terms += edges * len(edges) + [1]
    coded = [term if term >= 0 else (largest + term) | 1 << PRODUCT_BITS for term in terms]
    got = unit.run({"i": words_from_integers(sums, BITS), "product": words_from_integers(coded, PRODUCT_BITS + 1)})
    expected = [a + b for a, b in zip(sums[:-1], terms[:-1], strict=True)] + [-(1 << 97)]
    assert signed_integers(got["o"], BITS).tolist() == expected


def test_latency(unit):
    assert unit.latency() == unit.stated_latency


def test_bits_message():
    with pytest.raises(ValueError, match="bits must be more than a product's 81, not 81"):
        ExactAdd(81)
