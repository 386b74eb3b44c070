import numpy as np
import pytest

from nearflash.gateware.nand.bch.root_search import RootSearch
from nearflash.model.nand.bch.field import multiply, power
from nearflash.sim.pysim.harness import run_streams


def coefficients(bits: list[int], errors: int | None = None) -> list[dict[str, int]]:
    product = np.zeros(17, np.int32)
    product[0] = 0x123
    for bit in bits:
        product[1:] ^= multiply(product[:-1], np.full(16, power(np.array(4415 - bit))))
    return [{"value": int(value), "errors": len(bits) if errors is None else errors} for value in product]


@pytest.mark.parametrize("stalls", ["none", "both"])
def test_positions_ascend(stalls):
    patterns = [[4399], list(range(4370, 4386)), [4200, 4208, 4209, 4399]]
    inputs = [item for bits in patterns for item in coefficients(bits)]
    found = run_streams(RootSearch(), {"i": inputs}, {"o": 21}, stalls=stalls)["o"]
    assert [item.position for item in found] == [bit for bits in patterns for bit in bits]
    assert [item.last for item in found] == [bit == bits[-1] for bits in patterns for bit in bits]
    assert not any(item.uncorrectable for item in found)


def test_gives_up_where_roots_are_missing_or_lie_in_the_pad():
    inputs = coefficients([4390], 2) + coefficients([4390], 17) + coefficients([4390, 4400]) + coefficients([0, 4390])
    found = run_streams(RootSearch(), {"i": inputs}, {"o": 5}, timeout_cycles=5000)["o"]
    assert [(item.uncorrectable, item.last) for item in found] == [(1, 1), (1, 1), (1, 1), (0, 0), (0, 1)]
    assert [item.position for item in found[3:]] == [0, 4390]
