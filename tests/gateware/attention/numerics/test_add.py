import numpy as np
import pytest

from nearflash.gateware.attention.numerics.add import PAIR_PLACE, PAIR_SHIFT, WordAdd
from nearflash.gateware.attention.numerics.product import PRODUCT_BITS, ExactProduct
from nearflash.sim.verilator.ports import integers_from_words, words_from_integers

BITS, SCORE, CUT = 98, 36, 32
LARGEST = (1 << PRODUCT_BITS) - 1


@pytest.fixture(scope="module")
def unit(num_unit):
    return num_unit(WordAdd())


def coded(term):
    """A number as PRODUCT holds it."""
    return term if term >= 0 else (LARGEST + term) | 1 << PRODUCT_BITS


def run(unit, words, products, **modes):
    zero = {"scores": 0, "pair": 0, "borrow": 0}
    inputs = {"i": words_from_integers([w & (1 << BITS) - 1 for w in words], BITS),
              "product": words_from_integers(products, PRODUCT_BITS + 1)}  # fmt: skip
    return unit.run(inputs | zero | modes)["o"]


def scores(o):
    """The two scores of each word, signed."""
    raw = np.array(integers_from_words(o), object)
    pair = [(raw >> place) % (1 << SCORE) for place in (0, SCORE)]
    return [((one + (1 << SCORE - 1)) % (1 << SCORE) - (1 << SCORE - 1)).tolist() for one in pair]


def test_adds_a_product_to_a_sum(unit, signed_integers):
    rng = np.random.default_rng(1)
    edges = [0, 1, -1, (1 << SCORE) - 1, 1 << SCORE, -(1 << SCORE), (1 << 72) - 1, -(1 << 72), LARGEST, -LARGEST]
    sums = [int.from_bytes(rng.bytes(12), "little", signed=True) << 1 | 1 for _ in range(4_000)]
    terms = [int(rng.choice([-1, 1])) * int.from_bytes(rng.bytes(10), "little") for _ in sums]
    sums += [a for a in edges for _ in edges] + [(1 << 97) - 1]
    terms += edges * len(edges) + [1]
    got = run(unit, sums, [coded(term) for term in terms], pair=1, borrow=1)
    expected = [a + b for a, b in zip(sums[:-1], terms[:-1], strict=True)] + [-(1 << 97)]
    assert signed_integers(got, BITS).tolist() == expected


def test_adds_a_product_to_either_score(unit):
    rng = np.random.default_rng(2)
    limit = 1 << SCORE - 2
    low, high, term = (rng.integers(-limit, limit, 4_000).tolist() for _ in range(3))
    term[:3], low[:3], high[:3] = [0, -1, 1], [-1, 0, -1], [0, -1, -1]
    words = [a % (1 << SCORE) | b % (1 << SCORE) << SCORE for a, b in zip(low, high, strict=True)]
    got = run(unit, words, [coded(one << CUT) for one in term], scores=1)
    assert scores(got) == [[a + one for a, one in zip(word, term, strict=True)] for word in (low, high)]


def test_adds_a_pair_of_products_to_the_scores(unit):
    rng = np.random.default_rng(3)
    low, high = (rng.integers(-(1 << 34), 1 << 34, 4_000).tolist() for _ in range(2))
    factor = rng.integers(-(1 << 16), 1 << 16, 4_000).tolist()
    codes = rng.integers(0, 16, (2, 4_000)).tolist()
    factor[:4], codes[0][:4], codes[1][:4] = [-(1 << 16), -1, 0, (1 << 16) - 1], [15, 0, 15, 15], [0, 15, 0, 0]
    words = [a % (1 << SCORE) | b % (1 << SCORE) << SCORE for a, b in zip(low, high, strict=True)]
    pairs = [w * a + (w * (b - 8) << PAIR_PLACE) for w, a, b in zip(factor, *codes, strict=True)]
    products = [one % (1 << 43) << ExactProduct.INTEGER_PLACE for one in pairs]
    borrow = [int(w * a < 0) for w, a in zip(factor, codes[0], strict=True)]
    got = run(unit, words, products, scores=1, pair=1, borrow=borrow)
    expected = [[s + (w * (c - less) << PAIR_SHIFT) for s, w, c in zip(word, factor, code, strict=True)]
                for word, code, less in ((low, codes[0], 0), (high, codes[1], 8))]  # fmt: skip
    assert scores(got) == expected


def test_latency(unit):
    assert unit.latency() == unit.stated_latency
