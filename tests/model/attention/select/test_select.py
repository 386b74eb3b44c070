"""Selection equals the definitions, written without sorting."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearflash.model.attention.select.select import select, select_mass

KEYS = st.lists(st.integers(0, 5) | st.integers(0, 0xFFFF), min_size=1, max_size=40)


def by_definition(keys: list[int], count: int) -> list[bool]:
    """An entry is chosen when fewer than `count` others come before it."""
    return [sum((-other, j) < (-key, i) for j, other in enumerate(keys)) < count for i, key in enumerate(keys)]


@given(KEYS, st.integers(0, 50))
def test_the_largest_keys_then_the_lower_index(keys: list[int], count: int) -> None:
    assert select(np.array(keys, np.uint16), count).tolist() == by_definition(keys, count)


@given(KEYS, st.data(), st.integers(1, 0xFFFF), st.integers(0, 50))
def test_mass_equals_the_definition(keys: list[int], data: st.DataObject, mass: int, cap: int) -> None:
    weights = data.draw(st.lists(st.integers(0, 1 << 27), min_size=len(keys), max_size=len(keys)))
    weights[0] = max(weights[0], 1)
    threshold = max(
        t for t in keys if sum(w for k, w in zip(keys, weights, strict=True) if k >= t) << 16 >= mass * sum(weights)
    )
    expected = [chosen and key >= threshold for key, chosen in zip(keys, by_definition(keys, cap), strict=True)]
    got = select_mass(np.array(keys, np.uint16), np.array(weights, np.int64), mass, cap)
    assert got.tolist() == expected


@pytest.mark.parametrize(("mass", "chosen"), [(1 << 14, 1), (0x4001, 2), (0x8000, 2), (0xC001, 4), (0xFFFF, 4)])
def test_mass_of_equal_weights(mass: int, chosen: int) -> None:
    keys, weights = np.array([1, 9, 5, 3], np.uint16), np.full(4, 100)
    assert select_mass(keys, weights, mass, 4).sum() == chosen
