import numpy as np
import pytest

from nearflash.gateware.fp.product import Product
from nearflash.gateware.fp.raw import RAW, RawLayout


def numbers(layout: RawLayout, rows: int, seed: int) -> list[dict[str, int]]:
    rng = np.random.default_rng(seed)
    edges = [1 << (layout.sig_bits - 1), (1 << layout.sig_bits) - 1]
    sigs = [int(rng.integers(0, 1 << (layout.sig_bits - 1))) | edges[0] for _ in range(rows - 4)] + 2 * edges
    return [{"sig": s, "exp": int(rng.integers(-149, 128)), "sign": int(rng.integers(0, 2))} for s in sigs]


def words(layout: RawLayout, fields: list[dict[str, int]]) -> list[int]:
    return [layout.const(field).as_value().value for field in fields]


@pytest.mark.parametrize("b_bits", [17, 24, 51])
def test_product_is_exact(simulate, b_bits):
    product, layout = Product(b_bits), RawLayout(b_bits)
    a, b = numbers(RAW, 500, seed=51), numbers(layout, 500, seed=52)
    b = b[-4:] + b[:-4]
    found = simulate(product, {"a": words(RAW, a), "b": words(layout, b)}, ["o"])["o"]
    for x, y, word in zip(a, b, found, strict=True):
        raw = RawLayout(24 + b_bits).from_bits(word)
        exact = x["sig"] * y["sig"]
        carry = exact >> (23 + b_bits)
        assert (raw.sig, raw.exp) == (exact << (1 - carry), x["exp"] + y["exp"] + carry)
        assert raw.sign == x["sign"] ^ y["sign"]


def test_latency_and_blocks():
    assert [Product(b_bits).LATENCY for b_bits in (17, 18, 51, 52)] == [3, 4, 5, 6]


def test_special_values(simulate):
    zero, inf, nan, one = {"zero": 1}, {"inf": 1}, {"nan": 1}, {"sig": 1 << 23}
    a = [zero, zero, inf, inf, nan, one]
    b = [one, inf, zero, one, zero, nan]
    found = simulate(Product(), {"a": words(RAW, a), "b": words(RAW, b)}, ["o", "invalid"])
    kinds = [(raw.zero, raw.inf, raw.nan) for raw in (RawLayout(48).from_bits(word) for word in found["o"])]
    assert kinds == [(1, 0, 0), (0, 0, 1), (0, 0, 1), (0, 1, 0), (0, 0, 1), (0, 0, 1)]
    assert found["invalid"] == [0, 1, 1, 0, 0, 0]
