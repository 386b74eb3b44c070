"""Processor seconds of every test: `make durations` measures make test with it and prints a page.

Wall time on a shared machine says little. A test's figure is the user and system time of its process and of the
processes that it waited for (compilers, simulators, commands); a fixture's counts for the test that first needs it.

As a plugin (`pytest -p durations`, with this folder on PYTHONPATH) it appends a JSON object for each phase of each test
to the file that NEARFLASH_DURATIONS names; `python .ci/durations.py FILE` prints them as Markdown.
"""

import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "NEARFLASH_DURATIONS"
SLOWEST = 40
_BEFORE = pytest.StashKey[float]()


def _read_clock() -> float:
    """Processor seconds of this process and of those that it waited for."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """Begin to count as a test begins."""
    item.config.stash[_BEFORE] = _read_clock()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Attach a phase's seconds to its report, which xdist sends to the process that writes them."""
    report = yield
    now = _read_clock()
    report.cpu_s = round(now - item.config.stash[_BEFORE], 3)
    item.config.stash[_BEFORE] = now
    return report


def pytest_runtest_logreport(report: Any) -> None:
    """Append the phase to the file."""
    if (path := os.environ.get(VARIABLE)) and "PYTEST_XDIST_WORKER" not in os.environ:
        row = {"test": report.nodeid, "phase": report.when, "outcome": report.outcome, "cpu_s": report.cpu_s}
        with Path(path).open("a") as file:
            file.write(json.dumps(row) + "\n")


def print_page(rows: list[dict[str, Any]]) -> None:
    """Print totals by area of tests/, and the slowest tests."""
    tests: dict[str, float] = defaultdict(float)
    for row in rows:
        tests[row["test"]] += row["cpu_s"]
    areas: dict[str, list[float]] = defaultdict(list)
    for test, seconds in tests.items():
        areas[test.split("::")[0].split("/")[1]].append(seconds)
    print(f"{len(tests)} tests took {sum(tests.values()):.0f} s of processor time.\n")
    print("| area | tests | s | slowest s |\n|---|---:|---:|---:|")
    for area, each in sorted(areas.items(), key=lambda entry: -sum(entry[1])):
        print(f"| `{area}` | {len(each)} | {sum(each):.1f} | {max(each):.1f} |")
    print("\n| slowest tests | s |\n|---|---:|")
    for test, seconds in sorted(tests.items(), key=lambda entry: -entry[1])[:SLOWEST]:
        print(f"| `{test.removeprefix('tests/')}` | {seconds:.1f} |")


if __name__ == "__main__":
    print_page([json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()])
