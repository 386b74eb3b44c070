from pathlib import Path

import pytest

from nearflash.abi.errors import CommandError, PlanError
from nearflash.bench.offload.plan import run
from nearflash.bench.options import options_of

ROW = '{id="a", model="opt-30b", prompt=512, gbs=48, batches=3, percent=[20,80,0,100,0,100]%s}'


def blind(tmp_path: Path, *rows: str) -> Path:
    file = tmp_path / "blind.toml"
    file.write_text("[flexgen]\nrows = [\n" + ",\n".join(rows) + "]\n")
    return file


def test_one_set_of_constants_gives_every_fitted_figure_within_a_tenth():
    rows = list(run())
    assert len(rows) == 12
    for row in rows:
        assert row["error"] == pytest.approx(row["value"] / row["published"] - 1)
        assert abs(row["error"]) < 0.1, row
    assert {row["unit"] for row in rows} == {"s", "token/s"}


def test_forms_differ_where_transfers_overlap_and_nowhere_else(tmp_path):
    """No fitted row overlaps transfers with computing, so none can decide between the forms; others differ by them."""
    fitted = [[row["value"] for row in run(form=form)] for form in ("paper", "released", "nearflash")]
    assert fitted[0] == fitted[1] == fitted[2]
    file = blind(tmp_path, ROW % "", ROW.replace('"a"', '"b"') % ", overlap=false")
    paper, released = ([row["value"] for row in run(file, form=form)] for form in ("paper", "released"))
    assert paper[0] > released[0] and paper[1] == released[1]


def test_blind_rows_are_predicted_and_not_compared(tmp_path):
    other = ROW.replace('"a"', '"b"') % ", decode_only=true"
    third = ROW.replace('"a"', '"c"') % ", overlap=false"
    rows = {row["id"]: row for row in run(blind(tmp_path, ROW % "", other, third))}
    assert list(rows) == ["a", "b", "c"] and all("published" not in row for row in rows.values())
    assert rows["b"]["value"] > rows["a"]["value"] > rows["c"]["value"] > 0


def test_a_row_depends_on_what_it_describes_and_not_on_its_id(tmp_path):
    twins = list(run(blind(tmp_path, ROW % "", ROW.replace('"a"', '"fg01"') % "")))
    assert twins[0]["value"] == twins[1]["value"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (ROW.replace("opt-30b", "opt-31b") % "", "model must be one of opt-6.7b"),
        (ROW.replace("gbs=48", "gbs=1.5") % "", "gbs of a row must be int, not 1.5"),
        (ROW.replace("gbs=48, ", "") % "", "a row must have id, model"),
        (ROW % ", more=1", "a row must have id, model"),
        (ROW.replace("20,80,", "20,80,1,") % "", "percent of a row must be six numbers"),
        ('"text"', "a row must have id, model"),
        (ROW.replace("20,80", "60,80") % "", "shares must be between 0 and 1"),
        (ROW.replace("prompt=512", "prompt=0") % "", "prompt_tokens and new_tokens must be 1 at least"),
    ],
)
def test_rows_that_mean_nothing_are_rejected(tmp_path, row, message):
    with pytest.raises((CommandError, PlanError), match=message):
        list(run(blind(tmp_path, row)))


@pytest.mark.parametrize("text", ["", "[flexgen]\n", "[flexgen]\nrows = 3\n", "[flexgen", "flexgen = 3\n"])
def test_files_without_rows_are_rejected(tmp_path, text):
    file = tmp_path / "blind.toml"
    file.write_text(text)
    with pytest.raises(CommandError, match="blind must"):
        list(run(file))
    with pytest.raises(CommandError, match="blind must be a TOML file"):
        list(run(tmp_path / "absent.toml"))


def test_its_options_reach_the_command_line():
    assert set(options_of(run)) == {"blind", "form"}
