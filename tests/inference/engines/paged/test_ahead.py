from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import pytest

from nearflash.inference.engines.paged.ahead import read_chosen


@pytest.fixture
def threads():
    with ThreadPoolExecutor(1) as pool:
        yield pool


def read_groups(asked):
    def read(heads, groups):
        asked.extend(zip(heads.tolist(), groups.tolist(), strict=True))
        return (10 * heads + groups).astype(np.float16)[:, None].repeat(4, axis=1)

    return read


@pytest.mark.parametrize(
    ("wanted", "late"),
    [
        ([(0, 1), (0, 3), (1, 1), (1, 3)], []),  # as they were read
        ([(0, 3), (1, 1)], []),  # a part in one piece
        ([(0, 1), (1, 3)], []),  # and in several
        ([(0, 1), (0, 2), (1, 3)], [(0, 2)]),
        ([(0, 1), (0, 2), (1, 1)], [(0, 2)]),  # first and last as far apart as if all were there
        ([(0, 0), (1, 4)], [(0, 0), (1, 4)]),
        ([], []),
    ],
)
def test_groups_are_read_once(threads, wanted, late):
    early, asked = [], []
    chosen = np.zeros((2, 5), bool)
    chosen[:, [1, 2, 3]] = True
    ahead = read_chosen(7, threads, lambda: chosen, lambda _, groups: groups != 2, read_groups(early))
    wait([ahead.data])
    assert ahead.chosen is chosen and early == [(0, 1), (0, 3), (1, 1), (1, 3)]
    heads, groups = np.array(wanted, np.int64).reshape(-1, 2).T
    taken = ahead.take(heads, groups, read_groups(asked)).join()
    assert taken[:, :1].tolist() == [[10 * head + group] for head, group in wanted]
    assert taken.flags.c_contiguous and asked == late


def test_nothing_that_was_chosen_is_nothing_read(threads):
    asked = []
    ahead = read_chosen(7, threads, lambda: np.zeros((2, 5), bool), lambda heads, _: heads >= 0, read_groups([]))
    assert ahead.take(np.array([1]), np.array([4]), read_groups(asked)).join().tolist() == [[14] * 4] and asked == [
        (1, 4)
    ]


def test_a_choice_that_fails_is_an_error_where_it_is_asked_for(threads):
    ahead = read_chosen(7, threads, lambda: 1 // 0, lambda heads, _: heads >= 0, read_groups([]))
    wait([ahead.data])
    for use in (lambda: ahead.chosen, lambda: ahead.take(np.array([1]), np.array([4]), read_groups([]))):
        with pytest.raises(ZeroDivisionError):
            use()
