"""Rows of the attend bench, in small: the keys that readers of the JSON rely on, and nothing that differs."""

import pytest

from nearflash.abi.errors import CommandError
from nearflash.model.attention.random_vectors import MODES
from nearflash.verify.bench import attend, attend_equality
from nearflash.verify.bench.attend import PARTS, run, selector_rows
from nearflash.verify.bench.attend_equality import equality_rows, random_heads


def test_heads_are_of_all_modes_and_the_same_for_a_seed():
    heads, again = random_heads(48, seed=3), random_heads(48, seed=3)
    assert {mode for mode, _ in heads} == set(MODES)
    assert {(vector.settings.dim, len(vector.q)) for _, vector in heads} == {
        (dim, group) for dim in (64, 80, 128, 256) for group in (1, 4, 8)
    }
    assert all((a.k == b.k).all() and a.settings == b.settings for (_, a), (_, b) in zip(heads, again, strict=True))


def test_no_head_differs_from_the_model(monkeypatch):
    monkeypatch.setattr(attend_equality, "_FIRST_SIZE_MAX", 1 << 15)
    rows = list(equality_rows(count=12, everywhere=False))
    assert {"mode", "heads", "mismatches"} <= rows[0].keys()
    assert sum(row["heads"] for row in rows) == 12
    assert sum(row["mismatches"] for row in rows) == 0


def test_the_selector_keeps_its_limit():
    (row,) = selector_rows((128,))
    assert row["cycles"] <= row["limit_cycles"] == 2 * 128 // 4 + 600


def test_parts_run_in_their_own_order(monkeypatch):
    monkeypatch.setattr(attend, "PARTS", {name: lambda name=name: iter([{"part": name}]) for name in "abc"})
    assert [row["part"] for row in run(["c", "a"])] == ["a", "c"]
    assert [row["part"] for row in run()] == ["a", "b", "c"]


def test_unknown_parts_are_named_before_anything_runs():
    with pytest.raises(CommandError, match=f"parts must be of {', '.join(PARTS)}, not x"):
        next(run(["selector", "x"]))
