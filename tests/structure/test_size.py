"""Budgets of lines: a new feature pays by what it deletes, or raises its row in the same commit and says why there."""

import pytest

#: Lines of Python in each root, empty ones and comments too, rounded up to a hundred.
LINES = {"host": 79_100, "rtl": 30_800, "sim": 17_000, "hls": 100, "tests": 82_800}


@pytest.mark.parametrize("top", LINES)
def test_lines_are_within_the_budget(root, top, record_property):
    count = sum(len(path.read_text("utf-8").splitlines()) for path in (root / top).rglob("*.py"))
    record_property("lines", count)
    assert count <= LINES[top], f"{top} has {count} lines of Python, {count - LINES[top]} more than its budget"
    assert count > LINES[top] - 600, f"{top} has {count} lines of Python: lower its budget to keep what was saved"
