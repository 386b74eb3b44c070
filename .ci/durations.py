"""Processor seconds of every test: `make durations` measures make test with it and prints a page.

A test's first figure is the user and system time of its process and of the processes that it waited for (compilers,
simulators, commands), which a shared machine changes little; a fixture's counts for the test that first needs it. The
second one is wall time: where it is much more, the test waits.

As a plugin (`pytest -p durations`, with this folder on PYTHONPATH) it appends a JSON object for each phase of each test
to the file that NEARFLASH_DURATIONS names; `python .ci/durations.py FILE` prints them as Markdown.
"""

import json
import os
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "NEARFLASH_DURATIONS"
SLOWEST = 40
_BEFORE = pytest.StashKey[float]()


@dataclass
class Seconds:
    """Of a test, all phases."""

    cpu: float = 0.0
    wall: float = 0.0

    def add(self, cpu: float, wall: float) -> None:
        """Add a phase."""
        self.cpu, self.wall = self.cpu + cpu, self.wall + wall


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
        row["wall_s"] = round(report.duration, 3)
        with Path(path).open("a") as file:
            file.write(json.dumps(row) + "\n")


def print_page(rows: list[dict[str, Any]]) -> None:
    """Print totals by area of tests/, and the slowest tests."""
    tests: dict[str, Seconds] = defaultdict(Seconds)
    for row in rows:
        tests[row["test"]].add(row["cpu_s"], row["wall_s"])
    areas: dict[str, list[Seconds]] = defaultdict(list)
    for test, seconds in tests.items():
        areas[test.split("::")[0].split("/")[1]].append(seconds)
    total = sum(seconds.cpu for seconds in tests.values()), sum(seconds.wall for seconds in tests.values())
    print(f"{len(tests)} tests took {total[0]:.0f} s of processor time, {total[1]:.0f} s of workers' wall time.\n")
    print("| area | tests | cpu s | wall s | slowest cpu s |\n|---|---:|---:|---:|---:|")
    for area, figures in sorted(areas.items(), key=lambda entry: -sum(seconds.cpu for seconds in entry[1])):
        cpu, wall = (sum(values) for values in zip(*((each.cpu, each.wall) for each in figures), strict=True))
        print(f"| `{area}` | {len(figures)} | {cpu:.1f} | {wall:.1f} | {max(each.cpu for each in figures):.1f} |")
    for title, key in (("slowest tests", lambda s: s.cpu), ("tests that wait longest", lambda s: s.wall - s.cpu)):
        print(f"\n| {title} | cpu s | wall s |\n|---|---:|---:|")
        for test, seconds in sorted(tests.items(), key=lambda entry: -key(entry[1]))[:SLOWEST]:
            print(f"| `{test.removeprefix('tests/')}` | {seconds.cpu:.1f} | {seconds.wall:.1f} |")


if __name__ == "__main__":
    print_page([json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()])
