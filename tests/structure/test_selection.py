"""What `make test` leaves to `make test-full`, and that it says so."""

import importlib.util
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
AREAS = sorted(path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and any(path.rglob("test_*.py")))
SPEC = importlib.util.spec_from_file_location("tests_conftest", ROOT / "tests/conftest.py")
conftest = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(conftest)

RNG = np.random.default_rng(1)


class Item:
    """A test with one id for each `parametrize`."""

    def __init__(self, name, *ids, marked=False, **params):
        self.nodeid, self.ids, self.marked = f"{name}[{'-'.join(ids)}]", ids, marked
        self.callspec = SimpleNamespace(_idlist=ids, params=params)

    def get_closest_marker(self, name):
        return self.marked or None

    def add_marker(self, name):
        self.marked = True


def kept(items):
    conftest._mark_combinations(items)
    return [item.ids for item in items if not item.marked]


def test_every_value_of_each_parameter_is_kept_in_the_fewest_combinations():
    found = kept([Item("t", *ids) for ids in product("abcd", "xyz", "pq")])
    assert len(found) == 4
    assert [set(values) for values in zip(*found, strict=True)] == [set("abcd"), set("xyz"), set("pq")]


def test_rows_of_one_parameter_are_all_kept():
    assert len(kept([Item("t", row) for row in "abcdef"])) == 6


def test_what_is_marked_by_hand_stands_for_no_value():
    assert kept([Item("t", "a", "x", marked=True), Item("t", "a", "y"), Item("t", "b", "y")]) == [
        ("a", "y"),
        ("b", "y"),
    ]


def test_stalls_on_one_side_and_in_bursts_are_left():
    items = [Item("t", name, stalls=name) for name in ("none", "source", "sink", "both", "bursty")]
    assert kept(items) == [("none",), ("both",)]


def test_tests_of_other_names_are_other_tests():
    assert len(kept([Item("t", "a", "x"), Item("u", "a", "x")])) == 2


@pytest.mark.parametrize("options", [(), pytest.param(("-n", "2"), marks=pytest.mark.full)], ids=["alone", "workers"])
def test_a_run_says_how_many_tests_it_leaves(options, tmp_path):
    """Here of the area that is collected fastest; with workers the count comes from one of them."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not full", "-k", "no_such_test"]
    done = subprocess.run([*command, *options, "tests/model/nand"], cwd=ROOT, capture_output=True, text=True)
    assert re.search(r"^\d+ tests are only in make test-full: model \d+$", done.stdout, re.MULTILINE), done.stdout


def test_no_test_begins_after_the_time_given(monkeypatch):
    monkeypatch.setenv(conftest.UNTIL, "1")
    with pytest.raises(pytest.skip.Exception, match="time is up"):
        conftest.pytest_runtest_setup(SimpleNamespace())


@pytest.mark.parametrize("turn", ["first", "second"])
def test_what_a_test_draws_is_the_same_whatever_ran_before(turn):
    assert RNG.integers(1 << 62) == np.random.default_rng(1).integers(1 << 62)


@pytest.mark.parametrize("area", AREAS)
def test_the_readme_names_every_area(area):
    assert f"`{area}/`" in (ROOT / "tests/README.md").read_text()
