"""The error measure against torch."""

import math

import numpy as np

from nearflash.demo.audit import relative_error

ONE = np.float32(1)
ULP = np.spacing(ONE)


def error(p, p_torch, p_before):
    return relative_error(*(np.array([x], np.float32) for x in (p, p_torch, p_before)))


def test_one_ulp_is_free():
    assert error(ONE + ULP, ONE, 0.5) == 0
    assert error(ONE, ONE, 0.5) == 0


def test_more_is_relative_to_the_update():
    assert error(ONE + 3 * ULP, ONE, 0.5) == 2 * ULP / 0.5
    assert error(ONE + 3 * ULP, ONE, 0.75) == 2 * ULP / 0.25


def test_an_element_without_update_must_be_equal():
    assert error(ONE, ONE, ONE) == 0
    assert math.isinf(error(ONE + ULP, ONE, ONE))


def test_the_largest_counts():
    p, torch, before = (np.array(x, np.float32) for x in ([1, 2, 1 + 5 * ULP], [1, 2, 1], [0, 0, 0]))
    assert relative_error(p, torch, before) == 4 * ULP
