import numpy as np
import pytest

from nearflash.gateware.nand.bch.field import coordinates
from nearflash.gateware.nand.bch.key_equation import KeyEquation
from nearflash.model.nand.bch.field import multiply, power
from nearflash.sim.pysim.harness import run_streams, transfer_cycles

RNG = np.random.default_rng(1)


def beats(places: list[int]) -> list[int]:
    odd = [int(np.bitwise_xor.reduce(np.array(coordinates(i))[places])) for i in range(1, 32, 2)]
    return [sum(odd[4 * beat + k] << 13 * k for k in range(4)) for beat in range(4)]


def locator(places: list[int]) -> list[int]:
    """The product of (1 + alpha^place·x)."""
    product = np.zeros(17, np.int32)
    product[0] = 1
    for place in places:
        product[1:] ^= multiply(product[:-1], np.full(16, power(np.array(place))))
    return product.tolist()


def test_locators():
    """Equal to the product of its roots but for a factor, codeword after codeword."""
    patterns = [RNG.choice(4400, count, replace=False).tolist() for count in (1, 16, 2, 5)]
    found = run_streams(KeyEquation(), {"i": [b for p in patterns for b in beats(p)]}, {"o": 17 * 4}, stalls="both")[
        "o"
    ]
    for number, places in enumerate(patterns):
        items = found[17 * number : 17 * number + 17]
        assert all(item.errors == len(places) for item in items)
        factor = np.full(17, items[0].value, np.int32)
        expected = multiply(factor, np.array(locator(places), np.int32))
        assert items[0].value and [item.value for item in items] == expected.tolist()


@pytest.mark.parametrize(("errors", "limit"), [(1, 150), (16, 400)])
def test_cycles(errors, limit):
    cycles = transfer_cycles(KeyEquation(), {"i": beats(RNG.choice(4400, errors, replace=False).tolist())}, {"o": 17})
    taken = cycles["o"][-1] - cycles["i"][0] + 1
    assert limit - 40 < taken <= limit
