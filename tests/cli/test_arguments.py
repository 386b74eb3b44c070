"""Numbers among the arguments of commands."""

from argparse import ArgumentTypeError

import pytest

from nearflash.support import arguments


@pytest.mark.parametrize("text, number", [("0", 0), ("7", 7), (" 12 ", 12), ("1_000", 1000)])
def test_non_negative(text, number):
    assert arguments.non_negative(text) == number


@pytest.mark.parametrize("text", ["-1", "", "x", "1.5", "1e3", "inf"])
def test_what_is_no_count(text):
    with pytest.raises(ArgumentTypeError, match="must be a whole number, 0 or more, not "):
        arguments.non_negative(text)
    with pytest.raises(ArgumentTypeError, match="must be a whole number, 1 or more, not "):
        arguments.positive(text)


def test_positive():
    assert arguments.positive("1") == 1
    with pytest.raises(ArgumentTypeError, match="must be a whole number, 1 or more, not '0'"):
        arguments.positive("0")


def test_counts():
    assert arguments.counts("2,1") == (2, 1)
    with pytest.raises(ArgumentTypeError, match="must be a whole number, 1 or more, not 'x'"):
        arguments.counts("1,x")


@pytest.mark.parametrize("text, number", [("0", 0.0), ("1e-4", 1e-4), ("2", 2.0)])
def test_rate(text, number):
    assert arguments.rate(text) == number


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "x", ""])
def test_what_is_no_rate(text):
    with pytest.raises(ArgumentTypeError, match="must be a number, 0 or more, not "):
        arguments.rate(text)
