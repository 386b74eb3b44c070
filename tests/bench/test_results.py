import json
import subprocess
from pathlib import Path

import pytest

from nearflash.abi.errors import CommandError
from nearflash.bench.remeasure import TAKE, update_figures
from nearflash.bench.results import FIGURES, add_rows, machine, outputs, read_lines, read_plan, stale_pages
from nearflash.bench.stale import find_old_figures, sources_of
from nearflash.cli.main import main
from nearflash.device.bitstreams import load_board

ROOT = Path(__file__).resolve().parents[2]
LINE = {"page": "speed", "figure": "ours", "value": 2, "unit": "s", "level": "model", "command": "run it", "date": "d",
        "commit": "c", "machine": "m", "rates": "disk 1 GB/s", "of": "a whole"}  # fmt: skip


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / FIGURES
    folder.mkdir(parents=True)
    (folder / "pages.toml").write_text(
        '[pages.speed]\ntitle = "Speed"\nsummary = ["theirs"]\nintro = "How fast."\nnotes = "Why."\n'
        '[columns]\n"sim long" = ["b", "a"]\n[sources]\n"run it" = ["code"]\n"bench" = ["elsewhere"]\n'
        '[[headline]]\nwhat = "a step"\nours = "ours"\npeer = "theirs"\npeer_name = "Peer"\n'
    )
    peer = {**LINE, "figure": "theirs", "value": 5.0}
    (folder / "figures.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (LINE, peer)))
    (tmp_path / "README.md").write_text(
        "head\n<!-- headline figures: nearflash results pages -->\nold\n<!-- end of headline figures -->\ntail\n"
    )
    return tmp_path


def test_pages_and_readme_of_this_checkout_are_fresh():
    assert not stale_pages(ROOT), "run `nearflash results pages`"


def test_every_figure_says_where_it_comes_from():
    lines = [json.loads(text) for text in (ROOT / FIGURES / "figures.jsonl").read_text().splitlines()]
    needed = {"page", "figure", "value", "unit", "level", "command", "date", "commit", "machine", "source"}
    assert all(needed <= line.keys() for line in lines)
    assert all("of" in line for line in lines if line["unit"] == "fraction")
    assert len({line["figure"] for line in lines}) == len(lines)
    assert {line["take"] for line in lines if "take" in line} <= TAKE.keys()


def test_figures_of_manifests_are_theirs():
    """A build that was estimated again changes its figures, and those of its shares of the device."""
    lines = [json.loads(text) for text in (ROOT / FIGURES / "figures.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["source"].startswith("bitstreams/")]
    assert {line["source"] for line in lines} == {f"bitstreams/{board}/attend.json" for board in ("zynq7045", "zu17eg")}
    for line in lines:
        path = ROOT / line["source"]
        manifest, there = json.loads(path.read_text()), load_board(path.parent.name).resources
        name = line["figure"].rpartition(" ")[2].lower()
        if name == "path":
            assert line["value"] == manifest["logic_depth"], line["figure"]
        elif line["unit"] == "fraction":
            assert line["value"] == round(manifest["utilisation"][name] / getattr(there, name), 3), line["figure"]
            assert line["of"] == f"{getattr(there, name):,} {name.upper()}"
        else:
            assert line["value"] == manifest["utilisation"][name], line["figure"]
        assert manifest["git"].startswith(line["commit"]), line["figure"]


def test_a_page_has_the_figure_with_its_command_and_rates(checkout):
    page = outputs(checkout)[Path("docs/results/speed.md")]
    assert "| ours | 2 | s | a whole | model | c |" in page
    assert "run it" in page and "disk 1 GB/s" in page


def test_a_page_begins_with_its_summary_and_ends_with_its_notes(checkout):
    page = outputs(checkout)[Path("docs/results/speed.md")]
    assert (
        page.index("How fast.") < page.index("## Summary\n\n| figure") < page.index("| theirs") < page.index("## `run")
    )
    assert page.endswith("## Notes\n\nWhy.\n")


def test_a_summary_of_a_figure_that_is_gone_is_an_error(checkout):
    plan = checkout / FIGURES / "pages.toml"
    plan.write_text(plan.read_text().replace('["theirs"]', '["gone"]'))
    with pytest.raises(CommandError, match="the summary of speed must be of figures that there are, not 'gone'"):
        outputs(checkout)


def test_a_page_has_figures_and_rows_of_one_command(checkout):
    """Regression: a row has no level, and two tables need a line between them."""
    add_rows(checkout, [{"bench": "speed", "seconds": 3.5}], "speed", LINE["command"], None)
    page = outputs(checkout)[Path("docs/results/speed.md")]
    assert page.count("## `run it`") == 1
    assert "| theirs | 5 | s | a whole | model | c |\n\n| seconds | commit |\n" in page


def test_rows_show_six_columns_and_their_commit(checkout):
    keys = "abcdefgh"
    rows = [
        {"bench": "sim", "part": "long", "git": "0123456789ab", "same": 1, **dict.fromkeys(keys, n)} for n in (2, 3)
    ]
    add_rows(checkout, [*rows, *({**row, "part": "other"} for row in rows)], "speed", "run it", None)
    page = outputs(checkout)[Path("docs/results/speed.md")]
    assert "Part long: same 1.\n\n| b | a | commit |\n|---|---|---|\n| 2 | 2 | 012345678 |" in page
    assert "Part other: same 1.\n\n| a | b | c | d | e | f | commit |\n" in page
    assert "Also in [data/sim.jsonl](data/sim.jsonl): g, h.\n" in page


def test_no_table_of_this_checkout_is_wider_than_seven_columns():
    pages = [text for path, text in outputs(ROOT).items() if path.name != "README.md"]
    rows = [line for page in pages for line in page.splitlines() if line.startswith("|")]
    assert rows and max(line.replace("\\|", "").count("|") for line in rows) <= 8
    assert all(page.index("## Summary\n\n|") == page.index("\n## ") + 1 for page in pages if "\n| figure |" in page)


# Figures older than their code


def git(folder, *arguments):
    name = ("-c", "user.name=n", "-c", "user.email=e@e", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(folder), *name, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def history(checkout):
    """A checkout whose figures state its first commit."""
    git(checkout, "init", "-q")
    (checkout / "code").mkdir()
    for number in (1, 2):
        (checkout / "code/a.py").write_text(str(number))
        git(checkout, "add", "-A")
        git(checkout, "commit", "-qm", f"change {number}")
        if number == 1:
            data = checkout / FIGURES / "figures.jsonl"
            data.write_text(
                data.read_text().replace('"commit": "c"', f'"commit": "{git(checkout, "rev-parse", "HEAD")}"')
            )
    return checkout


def test_figures_older_than_their_code_are_listed(history, capsys):
    (old,) = find_old_figures(history)
    assert (old.page, old.command, old.count, len(old.since)) == ("speed", "run it", 2, 1)
    assert main(["results", "--root", str(history), "stale"]) == 1
    out, err = capsys.readouterr()
    assert "speed: 2 of `run it`: its code has 1 commit since" in out and "change 2" in out
    assert "2 figures are older than their code: measure them again" in err


def test_figures_of_this_commit_are_not_old(history, capsys):
    data = history / FIGURES / "figures.jsonl"
    lines = [
        {**json.loads(text), "commit": git(history, "rev-parse", "HEAD") + "+"}
        for text in data.read_text().splitlines()
    ]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert find_old_figures(history) == []
    assert main(["results", "--root", str(history), "stale"]) == 0


@pytest.mark.parametrize("text", ['"""Doc."""\n1  # why\n', "1\n"])
def test_comments_and_what_was_taken_back_make_no_figure_old(history, text):
    (history / "code/a.py").write_text(text)
    git(history, "commit", "-qam", "change 3")
    assert find_old_figures(history) == []


def test_published_figures_are_about_no_code(history):
    data = history / FIGURES / "figures.jsonl"
    data.write_text(data.read_text().replace('"level": "model"', '"level": "published"'))
    assert find_old_figures(history) == []


@pytest.mark.parametrize("commit", ["0123abc", "", "--all"])
def test_a_commit_that_the_history_does_not_have_is_old(history, commit):
    data = history / FIGURES / "figures.jsonl"
    data.write_text(
        "".join(json.dumps({**LINE, "figure": name, "commit": commit}) + "\n" for name in ("ours", "theirs"))
    )
    (old,) = find_old_figures(history)
    assert not old.since and "in this history (a shallow clone: git fetch --unshallow)" in str(old)


def test_without_git_or_a_history_the_answer_is_clear(checkout, monkeypatch, capsys):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(checkout.parent))
    assert main(["results", "--root", str(checkout), "stale"]) == 2
    assert "results stale must be run where git is installed, in a clone with its history" in capsys.readouterr().err
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CommandError, match="No such file or directory: 'git'"):
        find_old_figures(checkout)


def test_the_longest_part_of_a_command_names_its_code(checkout):
    sources = {"bench a": ["x"], "bench a --parts b": ["y", "z"]}
    assert sources_of("nearflash bench a --parts b --json", sources) == ("y", "z")
    with pytest.raises(CommandError, match="must have a key for the command 'make it': add what it measures"):
        sources_of("make it", sources)


def test_every_command_of_this_checkout_names_code_that_is_there():
    sources = read_plan(ROOT)["sources"]
    for line in read_lines(ROOT):
        if line.get("level") != "published":
            sources_of(line["command"], sources)
    assert [path for paths in sources.values() for path in paths if not (ROOT / path).exists()] == []


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
    assert "| config | cycles_per_second | commit |" in page and "| tiny | 2 | abc |" in page


@pytest.mark.parametrize(
    "text",
    ["", "not json", '{"config": "tiny"}', "[1]", "[]", "null", '{"bench": "sim", "git": "a", "rate": NaN}',
     '{"bench": "../sim"}', '{"bench": "figures"}'],
)  # fmt: skip
def test_what_no_bench_printed_is_rejected_and_changes_nothing(checkout, text, capsys):
    """A list ended the update in a traceback; a bench of another folder's name was written there."""
    file = checkout / "rows.jsonl"
    file.write_text(text)
    before = {path: path.read_bytes() for path in checkout.rglob("*") if path.is_file()}
    for arguments in (["add", str(file), "--page", "speed"], ["update", str(file)]):
        assert main(["results", "--root", str(checkout), *arguments, "--command", "x"]) == 2
        assert capsys.readouterr().err.startswith("nearflash: ")
    assert {path: path.read_bytes() for path in checkout.rglob("*") if path.is_file()} == before


def test_figures_that_say_from_which_rows_take_their_values_again(checkout, capsys):
    path = checkout / FIGURES / "figures.jsonl"
    said = [{**LINE, "figure": "same", "key": "cycles", "where": {"kind": "a"}},
            {**LINE, "figure": "worst", "key": "cycles", "take": "most"}, {**LINE, "figure": "by hand"}]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in said))
    rows = [{"bench": "sim", "kind": kind, "cycles": cycles, "git": "0123456789ab"} for kind, cycles in
            (("a", 2.50004), ("a", 2.50004), ("b", 7), ("none", None)) if cycles]  # fmt: skip
    file = checkout / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["results", "--root", str(checkout), "update", str(file), "--command", "run it", "--rates", "2 GB/s"]
    assert main(arguments) == 0
    assert capsys.readouterr().out == "same: 2 -> 2.5\nworst: 2 -> 7\n"
    found = read_lines(checkout)
    assert [line["value"] for line in found] == [2.5, 7, 2]
    assert found[0]["commit"] == "01234567" and found[0]["rates"] == "2 GB/s" and found[2] == said[2]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"cycles": 1, "git": "a"}, {"cycles": 2, "git": "a"}], "one value of 'ours', cycles where {}: it is 1, 2"),
        ([{"time": 1, "git": "a"}], "cycles where {}: it is in no row"),
        ([{"cycles": 1, "git": "a"}, {"cycles": 1, "git": "b"}], r"of one commit, .*, not of \['a', 'b'\]"),
        ([{"cycles": 1}], "of one commit, which they state, not of"),
    ],
)
def test_rows_that_do_not_say_a_figure_change_nothing(checkout, rows, message):
    path = checkout / FIGURES / "figures.jsonl"
    path.write_text(json.dumps({**LINE, "key": "cycles"}) + "\n")
    before = path.read_bytes()
    with pytest.raises(CommandError, match=message):
        update_figures(checkout, rows, "run it")
    with pytest.raises(CommandError, match=r"command must be that of figures in .* that have a key, not 'other'"):
        update_figures(checkout, [{"cycles": 1, "git": "a"}], "other")
    assert path.read_bytes() == before


def test_errors_name_what_exists(checkout, tmp_path):
    with pytest.raises(CommandError, match="page must be one of speed, not 'other'"):
        add_rows(checkout, [{"bench": "x"}], "other", "x", None)
    with pytest.raises(CommandError, match="checkout"):
        outputs(tmp_path / "elsewhere")
    (checkout / FIGURES / "figures.jsonl").write_text("{}\nbroken\n")
    with pytest.raises(CommandError, match=r"figures\.jsonl line 2 must be a JSON object"):
        outputs(checkout)
