"""Faults of a head and fixed-point formats: numbers that the kernel, the model and drivers share."""

import pytest

from nearflash.abi.attention import fixed_point
from nearflash.abi.attention.faults import FAULT_ADVICE, REFERENCE_FAULTS, Fault
from nearflash.abi.attention.fixed_point import score_limit_log2

BITS = {
    "DESCRIPTOR": 0,
    "MEMORY": 1,
    "ENTRY": 2,
    "UNCORRECTABLE": 3,
    "MISDIRECTED": 4,
    "NONFINITE": 5,
    "SCORE_RANGE": 6,
    "REFERENCE_HIGH": 7,
    "REFERENCE_LOW": 8,
    "WATCHDOG": 9,
}


def test_bits_of_the_faults():
    assert {fault.name: fault.bit_length() - 1 for fault in Fault} == BITS


def test_every_fault_has_an_advice():
    assert set(FAULT_ADVICE) == set(Fault)
    assert all(text and not text.endswith(".") for text in FAULT_ADVICE.values())


def test_faults_that_a_repeat_cures():
    assert REFERENCE_FAULTS == 0x180
    assert FAULT_ADVICE[Fault.REFERENCE_HIGH] == FAULT_ADVICE[Fault.REFERENCE_LOW]
    assert all("repeat" not in FAULT_ADVICE[fault] for fault in Fault if fault not in REFERENCE_FAULTS)


@pytest.mark.parametrize(
    ("dims", "limit"),
    [(1, 18), (2, 17), (3, 16), (4, 16), (5, 15), (64, 12), (65, 11), (128, 11), (129, 10), (256, 10)],
)
def test_score_limits(dims, limit):
    """A sum of `dims` products below the limit stays below 2^18, half of what a score holds."""
    assert score_limit_log2(dims) == limit
    assert dims << limit <= 1 << 18


def test_exact_sums_hold_the_largest_dot_products():
    """fp16's largest number is 65504; 256 products of a score, 2^17 of weights up to that and values."""
    unit = -fixed_point.EXACT_LSB
    assert (256 * 65504**2 << unit).bit_length() < fixed_point.QK_BITS
    assert (65504**2 << unit + 16).bit_length() < fixed_point.PV_BITS
    assert fixed_point.EXACT_LSB == 2 * -24, "the product of two subnormals"


def test_formats_nest():
    assert fixed_point.SCORE_LSB == fixed_point.LOGIT_LSB
    assert fixed_point.LOGIT_BITS < fixed_point.SCORE_BITS
    assert fixed_point.MAX_LOGIT_BITS == fixed_point.LOGIT_BITS + fixed_point.LOGIT_LSB + 8
    assert fixed_point.KEY_LOCAL == 0xFFFF
    assert 2.0**fixed_point.SCALE_LEAST_LOG2 < fixed_point.LOG2E * 256**-0.5 < 2.0**fixed_point.SCALE_LIMIT_LOG2
