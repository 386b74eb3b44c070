import numpy as np
import pytest

from nearflash.abi.bitmap import Section
from nearflash.abi.formats import BF16, FP16
from nearflash.model.weights.coded import codebook, decode, encode


@pytest.mark.parametrize("number", [FP16, BF16])
def test_every_pattern_comes_back(number):
    """Subnormals, infinities, NaNs and -0 too, with any codebook."""
    values = np.arange(1 << 16, dtype=np.uint16)
    for book in (codebook(values, number), bytes(3), bytes([1, 30, 0]), bytes([5, 5, 5])):
        planes = encode(values, book, number)
        np.testing.assert_array_equal(decode(planes, book, number), values)
        exponents = values >> number.mantissa_bits & ((1 << number.exponent_bits) - 1)
        np.testing.assert_array_equal(planes[Section.ESCAPES], exponents[~np.isin(exponents, list(book))])


def test_planes_of_fp16():
    """1 01010 1011011 01 1: sign, exponent, upper seven bits, bits 2 to 1, bit 0."""
    planes = encode(np.array([0b1_01010_1011011_01_1], np.uint16), bytes([9, 10, 11]), FP16)
    expected = {Section.LOW: [1], Section.CODES: [0b01_01], Section.ESCAPES: [], Section.VALUES: [0b1_1011011]}
    assert {section: fields.tolist() for section, fields in planes.items()} == expected


def test_planes_of_bf16():
    planes = encode(np.array([0b1_01111010_1011011, 0], np.uint16), bytes([9, 10, 11]), BF16)
    expected = {Section.CODES: [3, 3], Section.ESCAPES: [0b01111010, 0], Section.VALUES: [0b1_1011011, 0]}
    assert {section: fields.tolist() for section, fields in planes.items()} == expected


@pytest.mark.parametrize(
    ("exponents", "book"),
    [
        ([], [0, 0, 0]),
        ([7], [7, 0, 0]),
        ([9, 4, 4, 9, 7], [4, 9, 7]),
        ([3, 2, 1, 0], [0, 1, 2]),
        ([5, 5, 1], [5, 1, 0]),
    ],
)
def test_codebook_is_by_frequency_then_value(exponents, book):
    values = np.array(exponents, np.uint16) << 10 | 1
    assert list(codebook(values.astype(np.uint16), FP16)) == book


def test_only_as_many_bits_of_an_exponent_count_as_there_are():
    planes = {Section.LOW: [0, 0], Section.CODES: [0, 3], Section.ESCAPES: [0xE2], Section.VALUES: [0, 0]}
    arrays = {section: np.array(fields, np.uint16) for section, fields in planes.items()}
    assert decode(arrays, bytes([0xE1, 0, 0]), FP16).tolist() == [1 << 10, 2 << 10]
