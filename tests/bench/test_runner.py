import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nearflash.abi.errors import CommandError
from nearflash.abi.kernel.config import CONFIGS
from nearflash.bench import runner


class Point:
    def __init__(self, name, run):
        self.name, self.run = name, run

    def load(self):
        if isinstance(self.run, Exception):
            raise self.run
        return self.run


@pytest.fixture
def points(monkeypatch):
    found = [
        Point("update", lambda: iter([{"config": "update-tiny", "cycles_per_param": 8.5, "unit": "cycles"}, {"n": 2}])),
        Point("fp", lambda: iter([{"op": "add", "mismatches": 0}])),
        Point("gone", ModuleNotFoundError("no", name="amaranth")),
    ]
    monkeypatch.setattr(runner, "entry_points", lambda group, name=None: [p for p in found if name in (None, p.name)])
    return found


def test_every_row_says_where_it_comes_from(points):
    rows = list(runner.measure("update"))
    assert rows[0]["bench"] == "update" and rows[0]["cycles_per_param"] == 8.5
    assert rows[0]["digest"] == CONFIGS["update-tiny"].digest and rows[1]["digest"] is None
    assert re.fullmatch(r"[0-9a-f]{12}\+?", rows[0]["git"])
    assert {"python", "numpy"} <= set(rows[0]["tools"])


def test_all_runs_every_bench_in_order_of_name(points):
    points.pop()
    assert [row["bench"] for row in runner.measure("all")] == ["fp", "update", "update"]


def test_unknown_and_incomplete_benches_are_named(points):
    with pytest.raises(CommandError, match="bench must be one of all, fp, gone, update, not 'nope'"):
        list(runner.measure("nope"))
    with pytest.raises(CommandError, match="bench 'gone' needs the package 'amaranth'; pip install"):
        list(runner.measure("gone"))


def test_parts_go_to_a_bench_that_has_them(points):
    points.append(Point("long", lambda parts=None: iter([{"part": part} for part in parts or ["a", "b"]])))
    assert [row["part"] for row in runner.measure("long")] == ["a", "b"]
    assert [row["part"] for row in runner.measure("long", parts=["b"])] == ["b"]
    with pytest.raises(CommandError, match=r"options of bench 'fp' must be of none, not parts \(\['b', 'c'\]\)"):
        list(runner.measure("fp", parts=["b", "c"]))
    with pytest.raises(CommandError, match="parts must be of one bench, not of all"):
        list(runner.measure("all", parts=["b"]))


def test_a_mode_goes_to_a_bench_that_has_them(points):
    points.append(Point("modes", lambda mode="any": iter([{"mode": mode}])))
    assert [row["mode"] for row in runner.measure("modes", mode="one")] == ["one"]
    assert [row["mode"] for row in runner.measure("modes")] == ["any"]
    with pytest.raises(CommandError, match="options of bench 'fp' must be of none, not texts"):
        list(runner.measure("fp", texts=[Path("some")]))
    with pytest.raises(CommandError, match=r"options of bench 'fp' must be of none, not mode \('one'\)"):
        list(runner.measure("fp", mode="one"))


def test_a_bench_is_summed_up_by_its_module_without_importing_it():
    script = (
        "import sys; from nearflash.bench.runner import summary; print(summary('update'), 'amaranth' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("the kernel in cycle-accurate simulation") and done.stdout.endswith(" False\n")
    assert runner.summary("nope") == ""


def test_json_goes_to_stdout_and_text_to_stderr(points, capsys):
    runner.print_rows(runner.measure("update"), as_json=True)
    captured = capsys.readouterr()
    assert [json.loads(line)["bench"] for line in captured.out.splitlines()] == ["update"] * 2 and not captured.err
    runner.print_rows(runner.measure("update"), as_json=False)
    captured = capsys.readouterr()
    assert not captured.out
    assert captured.err.splitlines()[0] == "update      config update-tiny  cycles_per_param 8.5  unit cycles"


def test_mismatches_are_summed_for_the_exit_code(capsys):
    assert runner.print_rows([{"bench": "x", "mismatches": 2}, {"bench": "x"}, {"mismatches": 1}], as_json=True) == 3
    assert runner.print_rows([{"bench": "x", "mismatches": 0}], as_json=False) == 0
