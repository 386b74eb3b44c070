import numpy as np
import pytest

from nearflash.abi.topk import ValueFormat
from nearflash.gateware.gradients.values import ValueRows
from nearflash.model.gradients.topk import fp32_pattern
from nearflash.sim.pysim.harness import measure_latency
from nearflash.sim.stalls import STALLS
from nearflash.sim.verilator.streams import StreamUnit


@pytest.fixture(scope="module")
def unit():
    return StreamUnit(ValueRows(), "value-rows")


def words(patterns, last=False):
    """64-bit words of patterns, each with `last` beside it: rows of uint32."""
    return np.column_stack([patterns.view("<u4").reshape(-1, 2), np.full(patterns.nbytes // 8, last, np.uint32)])


@pytest.mark.parametrize("value_format", [ValueFormat.FP16, ValueFormat.BF16])
def test_every_pattern_of_16_bits(unit, value_format):
    patterns = np.arange(1 << 16, dtype=np.uint16)
    expected = [fp32_pattern(bits, value_format.number_format) for bits in patterns.tolist()]
    found = unit.run({"i": words(patterns)}, {"o": 1 << 14}, hold={"value_format": value_format})["o"]
    np.testing.assert_array_equal(found.reshape(-1), expected)


@pytest.mark.parametrize("stalls", STALLS)
def test_halves_of_fp32_rows(unit, stalls):
    """Sections of odd and even numbers of words: a row that a section's last word leaves half goes out."""
    rng = np.random.default_rng(1)
    sections = [rng.integers(0, 1 << 32, 2 * count, np.uint32) for count in rng.integers(1, 7, 100)]
    given = [np.concatenate([words(section[:-2]), words(section[-2:], last=True)]) for section in sections]
    rows = sum(-(-len(section) // 4) for section in sections)
    found = unit.run({"i": np.concatenate(given)}, {"o": rows}, stalls=stalls, seed=1)["o"]
    first = 0
    for section in sections:
        np.testing.assert_array_equal(found[first:].reshape(-1)[: len(section)], section)
        first += -(-len(section) // 4)


def test_latency():
    row = [{"data": 1, "last": 0}, {"data": 2, "last": 1}]
    assert measure_latency(ValueRows(), {"i": row}) == ValueRows.LATENCY
