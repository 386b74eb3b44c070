"""`nearflash explore` from its arguments to what it prints."""

import argparse
import json

import pytest

from nearflash.abi.errors import CommandError, PlanError
from nearflash.cli.explore import amounts, explore, parse_ranges
from nearflash.explore.systems.instinfer import _mean_rest

pytest.importorskip("numpy", reason="the models compute with numpy")


def run(*arguments):
    parser = argparse.ArgumentParser()
    explore(parser.add_subparsers())
    parsed = parser.parse_args(["explore", *map(str, arguments)])
    return parsed.run(parsed)


def rows(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("text", "found"),
    [("7", [7]), ("100k", [100_000]), ("1M", [1_000_000]), ("4..64", [4, 8, 16, 32, 64]), ("128,1k", [128, 1000]),
     ("5..19,3", [5, 10, 3])],
)  # fmt: skip
def test_amounts(text, found):
    assert amounts(text) == found


@pytest.mark.parametrize("text", ["", "k", "0", "-4", "8..4", "1.5", "4..", "..8"])
def test_amounts_that_are_none(text):
    with pytest.raises(argparse.ArgumentTypeError):
        amounts(text)


@pytest.mark.parametrize(("text", "found"), [("3", [3]), ("1..4", [1, 2, 3, 4]), ("1,6..7", [1, 6, 7])])
def test_ranges(text, found):
    assert parse_ranges(text) == found


@pytest.mark.parametrize("text", ["", "0", "5..1", "1..100000", "a..b"])
def test_ranges_that_are_none(text):
    with pytest.raises(argparse.ArgumentTypeError):
        parse_ranges(text)


def test_splits_as_json(capsys):
    code = run("kvnand", "--model", "llama3.1-70b", "--quant", "w4a16", "--context", "100k", "--dies", 8, "--json")
    found = rows(capsys)
    assert code == 0
    assert len(found) == 8 + 1
    assert found[-1]["arrangement"].startswith("nearflash")
    assert sum(row["best"] for row in found) == 1
    assert {row["fits"] for row in found} == {True, False}
    assert all("git" in row for row in found)


def test_splits_as_a_table_and_a_picture(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="pictures are drawn by matplotlib")
    file = tmp_path / "grid.png"
    assert run("kvnand", "--dies", 4, "--png", file) == 0
    shown = capsys.readouterr()
    assert "D-(1+3)" in shown.out and str(file) in shown.err
    assert file.read_bytes().startswith(b"\x89PNG")


def test_serving(capsys):
    assert run("instinfer", "--batch", "64", "--csds", "1..2", "--json") == 0
    found = rows(capsys)
    assert len(found) == 2 * 6
    assert found[0]["system"] == "FlexGen, 1 SSD"


def test_training(capsys):
    assert run("smart-infinity", "--model", "gpt2-8.4b", "--csds", "6", "--json") == 0
    gains = {row["method"]: row["speed_up"] for row in rows(capsys)}
    assert 0.99 * 1.18 <= gains["SU"] <= 1.24
    assert gains["nearflash"] > gains["SU+O+C"] > gains["SU+O"]


def test_passes(capsys):
    assert run("endor", "--layers", "0/0/1", "--json") == 0
    assert [row["format"] for row in rows(capsys)][:2] == ["dense", "bitmap"]


def test_builds(capsys):
    assert run("engine", "--board", "zynq7045", "--json") == 0
    found = rows(capsys)
    assert found and all(row["fits"] for row in found)
    assert run("engine", "--all", "--json") == 0
    assert len(rows(capsys)) > len(found)


def test_systems_beside_one_another(capsys, tmp_path):
    file = tmp_path / "trace.json"
    assert run("compare", "--trace", file) == 0
    shown = capsys.readouterr().out
    assert "nearflash sparf-page" in shown and "assumptions:" in shown
    assert json.loads(file.read_text())["traceEvents"]
    assert run("compare", "--json") == 0
    assert all(row["assumptions"] for row in rows(capsys))


def test_pictures_of_sweeps(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="pictures are drawn by matplotlib")
    for name, given in (
        ("instinfer", ["--batch", "64", "--csds", "1,2"]),
        ("smart-infinity", ["--csds", "1,2"]),
        ("endor", []),
    ):
        file = tmp_path / f"{name}.png"
        assert run(name, *given, "--png", file) == 0
        assert file.stat().st_size > 1000
    assert run("compare", "--png", tmp_path / "all.png") == 0
    assert len(list(tmp_path.glob("all-*.png"))) == 5


def test_check(capsys):
    assert run("check", "--json") == 0
    found = rows(capsys)
    figures = [row for row in found if row["kind"] == "figure"]
    assert len(figures) >= 30
    assert all(row.keys() >= {"id", "value", "unit", "published", "error", "source"} for row in figures)
    conclusions = [row for row in found if row["kind"] == "conclusion"]
    assert len(conclusions) >= 18 and len(conclusions) + len(figures) == len(found)
    assert all(row.keys() >= {"id", "what", "verdict", "values", "source"} for row in conclusions)


def test_check_as_text(capsys):
    """Conclusions first, then why ours disagrees, then figures."""
    assert run("check") == 0
    shown = capsys.readouterr().out
    order = [shown.index(text) for text in ("verdict", "to settle it:", "published")]
    assert order == sorted(order)


def test_the_choice_by_context(capsys):
    assert run("kvnand", "--model", "llama3.1-70b", "--quant", "w4a16", "--dies", 8, "--choose", "--json") == 0
    assert [row["arrangement"] for row in rows(capsys)] == ["C-8", "D-(4+4)"]


def test_a_mechanism_that_is_switched_off(capsys):
    given = ("kvnand", "--model", "llama3.1-70b", "--quant", "w4a16", "--context", "100k", "--dies", 8, "--json")
    assert run(*given, "--without", "confined") == 0
    assert [row["arrangement"] for row in rows(capsys) if row["best"]] == ["C-8"]
    with pytest.raises(PlanError, match="mechanism must be one of"):
        run(*given, "--without", "magic")


def test_parameters_on_the_drives(capsys):
    assert run("smart-infinity", "--model", "gpt2-8.4b", "--csds", "6", "--parameters", "drives", "--json") == 0
    assert {row["method"]: row["speed_up"] for row in rows(capsys)}["SU"] > 1.24


def test_check_of_other_rows(capsys, tmp_path):
    file = tmp_path / "blind.toml"
    file.write_text(
        '[smart_infinity]\nrows = [{id = "x", model = "gpt2-8.4b", gpu = "a5000", csds = 2, method = "SU"}]\n'
    )
    assert run("check", "--blind", file, "--json") == 0
    (row,) = rows(capsys)
    assert row["id"] == "x" and row["unit"] == "ratio"
    with pytest.raises(CommandError, match="blind must be a TOML file"):
        run("check", "--blind", tmp_path / "none.toml")


def test_report(monkeypatch, tmp_path):
    """The page itself is explore/studies/test_report.py's."""
    pytest.importorskip("matplotlib", reason="pictures are drawn by matplotlib")
    from nearflash.explore.studies import report

    monkeypatch.setattr(report, "report_page", lambda: "<!doctype html>")
    file = tmp_path / "report.html"
    assert run("report", "-o", file) == 0
    assert file.read_text() == "<!doctype html>"
    with pytest.raises(CommandError, match=r"output must end with .html, not 'report.txt'"):
        run("report", "-o", tmp_path / "report.txt")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("kvnand", "--model", "gpt-5"), "model must be one of"),
        (("kvnand", "--quant", "w1a1"), "quant must be one of"),
        (("endor", "--layers", "0/0/0"), "layers must be 0 or more"),
        (("endor", "--layers", "90/0/0"), "layers must be 64 at most"),
        (("smart-infinity", "--keep", "2"), "keep must be above 0"),
        (("engine", "--board", "none"), "board must be one of"),
    ],
)
def test_values_that_the_models_reject(arguments, message):
    with pytest.raises(PlanError, match=message):
        run(*arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ("kvnand", "--dies", "0"),
        ("endor", "--layers", "1/2"),
        ("endor", "--layers", "a/b/c"),
        ("instinfer", "--csds", "0"),
    ],
)
def test_values_that_the_parser_rejects(arguments, capsys):
    with pytest.raises(SystemExit):
        run(*arguments)
    assert "must be" in capsys.readouterr().err


def test_what_if(capsys):
    assert run("smart-infinity", "--model", "gpt2-8.4b", "--csds", "6", "--json") == 0
    before = {row["method"]: row["seconds"] for row in rows(capsys)}
    change = "smartssd.smartssd.write_bytes_per_s=1.6e9"
    assert run("smart-infinity", "--model", "gpt2-8.4b", "--csds", "6", "--set", change, "--json") == 0
    after = {row["method"]: row["seconds"] for row in rows(capsys)}
    assert all(after[method] > before[method] for method in before)
    with pytest.raises(PlanError, match=r"what-if must name FILE\.PART\.KEY"):
        run("check", "--set", "gpu.h100.memory_bytes=3")


@pytest.mark.parametrize("text", ["gpu.a5000.memory_bytes", "gpu.a5000.memory_bytes=much", "="])
def test_what_if_of_no_number(text, capsys):
    with pytest.raises(SystemExit):
        run("check", "--set", text)
    assert "must" in capsys.readouterr().err


def test_fleets(capsys):
    assert run("fleet", "--near", "1,2", "--plain", "1..3", "--json") == 0
    found = rows(capsys)
    assert [(row["near"], row["plain"]) for row in found] == [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3)]
    assert found[0]["seconds"] > found[-1]["seconds"]


def test_clusters(capsys):
    assert run("serving-cluster", "--hosts", "1,2", "--gpus", "4", "--prompt", "2k", "--rate", "1", "--json") == 0
    found = rows(capsys)
    assert [row["hosts"] for row in found] == [1, 1, 1, 2, 2, 2] and sum(row["best"] for row in found) == 1
    assert run("training-cluster", "--hosts", "1", "--drives", "4,8", "--dram", "64", "--json") == 0
    assert {row["layout"]: row["fits"] for row in rows(capsys)}["host memory"] is False


@pytest.mark.parametrize(
    "arguments",
    [("kvnand", "--dies", "99999999999"), ("kvnand", "--context", "9" * 30), ("kvnand", "--context", "1..1" + "0" * 30),
     ("instinfer", "--new", "9" * 22), ("instinfer", "--csds", "9" * 12),
     ("serving-cluster", "--rate", "nan"), ("smart-infinity", "--set", "csd.instinfer.clock_hz=nan"),
     ("smart-infinity", "--set", f"csd.instinfer.clock_hz={'9' * 5000}")],
)  # fmt: skip
def test_numbers_beyond_all_measure_are_refused_at_once(capsys, arguments):
    """All splits of 10^11 dies had been counted."""
    with pytest.raises(SystemExit) as ended:
        run(*arguments)
    assert ended.value.code == 2 and "must be" in capsys.readouterr().err


def test_a_mean_over_many_tokens_is_that_of_the_sum():
    for first, count, block in ((0, 1, 1), (7, 5, 3), (1024, 999, 16), (5, 64, 128)):
        assert _mean_rest(first, count, block) == sum(t % block for t in range(first, first + count)) / count
    assert run("instinfer", "--batch", "4", "--csds", "1", "--new", "1000000000000") == 0
