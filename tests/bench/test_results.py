import json
from pathlib import Path

import pytest

from nearflash.abi.errors import CommandError
from nearflash.bench.results import FIGURES, add_rows, machine, outputs, stale
from nearflash.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
LINE = {"page": "speed", "figure": "ours", "value": 2, "unit": "s", "level": "model", "command": "run it", "date": "d",
        "commit": "c", "machine": "m", "rates": "disk 1 GB/s", "of": "a whole"}  # fmt: skip


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / FIGURES
    folder.mkdir(parents=True)
    (folder / "pages.toml").write_text(
        '[pages.speed]\ntitle = "Speed"\nintro = "How fast."\n'
        '[[headline]]\nwhat = "a step"\nours = "ours"\npeer = "theirs"\npeer_name = "Peer"\n'
    )
    peer = {**LINE, "figure": "theirs", "value": 5.0}
    (folder / "figures.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (LINE, peer)))
    (tmp_path / "README.md").write_text(
        "head\n<!-- headline figures: nearflash results pages -->\nold\n<!-- end of headline figures -->\ntail\n"
    )
    return tmp_path


def test_pages_and_readme_of_this_checkout_are_fresh():
    assert not stale(ROOT), "run `nearflash results pages`"


def test_every_figure_says_where_it_comes_from():
    lines = [json.loads(text) for text in (ROOT / FIGURES / "figures.jsonl").read_text().splitlines()]
    needed = {"page", "figure", "value", "unit", "level", "command", "date", "commit", "machine", "source"}
    assert all(needed <= line.keys() for line in lines)
    assert all("of" in line for line in lines if line["unit"] == "fraction")
    assert len({line["figure"] for line in lines}) == len(lines)


def test_a_page_has_the_figure_with_its_command_and_rates(checkout):
    page = outputs(checkout)[Path("docs/results/speed.md")]
    assert "| ours | 2 | s | a whole |" in page
    assert "run it" in page and "disk 1 GB/s" in page and "commit c" in page


def test_a_page_has_figures_and_rows_of_one_command(checkout):
    """Regression: a row has no level, and two tables need a line between them."""
    add_rows(checkout, [{"bench": "speed", "seconds": 3.5}], "speed", LINE["command"], None)
    page = outputs(checkout)[Path("docs/results/speed.md")]
    assert "Evidence: model." in page and page.count("## `run it`") == 1
    assert "| theirs | 5 | s | a whole |\n\n| seconds |\n" in page


def test_readme_shows_ours_the_peers_and_the_ratio(checkout):
    text = outputs(checkout)[Path("README.md")]
    assert text.startswith("head\n") and text.endswith("tail\n") and "old" not in text
    assert "| a step | 2 s | 5 (Peer) | 2.5 |" in text


def test_pages_command_writes_what_is_stale_and_check_only_tells_it(checkout, capsys):
    where = ["results", "--root", str(checkout), "pages"]
    assert main([*where, "--check"]) == 1
    assert "speed.md" in capsys.readouterr().out
    assert not (checkout / "docs/results/speed.md").exists()
    assert main(where) == 0
    assert main([*where, "--check"]) == 0


def test_rows_of_a_bench_replace_those_of_the_same_command(checkout, capsys):
    file = checkout / "rows.jsonl"
    add = ["results", "--root", str(checkout), "add", str(file), "--page", "speed", "--command", "bench it"]
    for rate in (1, 2):
        file.write_text(json.dumps({"bench": "sim", "config": "tiny", "cycles_per_second": rate, "git": "abc"}) + "\n")
        assert main([*add, "--rates", "memory 9 GB/s"]) == 0
    lines = [json.loads(text) for text in (checkout / FIGURES / "sim.jsonl").read_text().splitlines()]
    assert [line["row"]["cycles_per_second"] for line in lines] == [2]
    assert lines[0]["machine"] == machine() and lines[0]["rates"] == "memory 9 GB/s"
    page = outputs(checkout)[Path("docs/results/speed.md")]
    assert "| config | cycles_per_second |" in page and "| tiny | 2 |" in page and "commit abc" in page


@pytest.mark.parametrize("text", ["", "not json", '{"config": "tiny"}', "[1]"])
def test_what_no_bench_printed_is_rejected_and_changes_nothing(checkout, text, capsys):
    (checkout / "rows.jsonl").write_text(text)
    before = sorted(path.name for path in (checkout / FIGURES).iterdir())
    arguments = ["results", "--root", str(checkout), "add", str(checkout / "rows.jsonl"), "--page", "speed"]
    assert main([*arguments, "--command", "x"]) == 2
    assert "JSON" in capsys.readouterr().err
    assert sorted(path.name for path in (checkout / FIGURES).iterdir()) == before


def test_errors_name_what_exists(checkout, tmp_path):
    with pytest.raises(CommandError, match="page must be one of speed, not 'other'"):
        add_rows(checkout, [{"bench": "x"}], "other", "x", None)
    with pytest.raises(CommandError, match="checkout"):
        outputs(tmp_path / "elsewhere")
    (checkout / FIGURES / "figures.jsonl").write_text("{}\nbroken\n")
    with pytest.raises(CommandError, match=r"figures\.jsonl line 2 must be a JSON object"):
        outputs(checkout)
