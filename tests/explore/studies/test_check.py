"""Ours against what papers publish, and constants that know nothing of single figures."""

import ast
import json
import re
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

from nearflash.abi.errors import CommandError, PlanError
from nearflash.explore.studies.check import _holds, conclusions, figures, predictions
from nearflash.explore.studies.measures import MEASURES, measure
from nearflash.explore.tables import what_if

SOURCE = Path(__file__).resolve().parents[3] / "host/nearflash/explore"
FIGURES = {row["id"]: row for row in figures()}
PUBLISHED = tomllib.loads((files("nearflash.explore") / "published.toml").read_text("utf-8"))["figures"]
QUESTIONS = tomllib.loads((files("nearflash.explore") / "questions.toml").read_text("utf-8"))["questions"]
CONCLUSIONS = {row["id"]: row for row in conclusions()}
GIVEN = tomllib.loads((files("nearflash.explore") / "conclusions.toml").read_text("utf-8"))["conclusions"]
#: Published values that are small counts too: four drives, and four bytes or lanes.
COMMON = {4.0}


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_within_a_tenth_or_explained(name):
    row = FIGURES[name]
    assert abs(row["error"]) <= 0.1 or row.get("explained", "").strip(), row


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_states_where_it_is_from(name):
    row = FIGURES[name]
    assert row["source"].strip() and row["unit"].strip() and row["what"].strip()
    assert row["value"] / row["published"] - 1 == pytest.approx(row["error"])
    json.dumps(row)


def test_ids_are_unique():
    assert len(FIGURES) == len(PUBLISHED) >= 30


@pytest.mark.parametrize(
    ("name", "published"),
    [("endor-dense", 54), ("endor-bitmap", 35.8), ("endor-layer", 1.64), ("endor-int8", 1.48),
     ("instinfer-dense", 6.85),
     ("instinfer-flexgen-share", 0.989), ("instinfer-dense-share", 0.807), ("smart-update-share", 0.7557),
     ("smart-su-low", 1.18), ("smart-su-high", 1.24), ("kvnand-128", 1.98), ("kvnand-energy-7b", 0.75)],
)  # fmt: skip
def test_the_figures_of_the_papers_are_there(name, published):
    assert FIGURES[name]["published"] == published


@pytest.mark.parametrize("name", CONCLUSIONS)
def test_every_conclusion_is_true_or_has_a_reason(name):
    row = CONCLUSIONS[name]
    assert row["source"].strip() and row["what"].strip() and row["values"]
    if row["verdict"] == "disagrees":
        assert row["reason"].strip() and row["settle"].strip()
    json.dumps(row)


def test_a_conclusion_that_is_true_has_no_reason_left():
    assert len(CONCLUSIONS) == len(GIVEN) >= 18
    disagreeing = {row["id"] for row in CONCLUSIONS.values() if row["verdict"] == "disagrees"}
    assert {row["id"] for row in GIVEN if "disagrees" in row} == disagreeing == {"flexgen-best-batch-two"}


@pytest.mark.parametrize(
    ("relation", "values", "holds"),
    [("rises", [1, 2, 3], True), ("rises", [1, 3, 3], False), ("flat", [1.0, 1.04], True), ("flat", [1.0, 1.06], False),
     ("crosses one", [0.5, 1.0], True), ("crosses one", [1.5, 2.0], False), ("between", [2, 9], False)],
)  # fmt: skip
def test_relations(relation, values, holds):
    assert _holds({"relation": relation, "low": 0, "high": 5}, values) is holds


def test_conclusions_follow_the_hardware():
    """On a GPU with twice the memory, FlexGen's prefill of 128 sequences fits: the paper's conclusion is gone."""
    with what_if({"gpu.a6000.memory_bytes": 96e9}):
        row = next(row for row in conclusions() if row["id"] == "flexgen-feasible-batch")
    assert row["verdict"] == "disagrees" and not row["reason"]


def test_few_figures_gave_constants():
    """What a constant was taken from shows nothing; most figures have to be predictions."""
    predicted = [row for row in FIGURES.values() if "calibrates" not in row]
    assert len(predicted) > 2 * (len(FIGURES) - len(predicted))
    far = {row["id"] for row in predicted if abs(row["error"]) >= 0.1}
    assert far == {"instinfer-deepspeed-swap"}, "each has the reason, and what would settle it"
    assert all("to settle it" in FIGURES[name]["explained"] for name in far)


def python_sources():
    return [*sorted((SOURCE / "systems").glob("*.py")), *(SOURCE / f"{name}.py" for name in (
        "ssd", "links", "processors", "energy", "wear", "shapes", "studies/dse", "outcome"))]  # fmt: skip


def blind_ids():
    return re.compile(r"\b(en|ii|si|kv|fg)\d\d\b")


@pytest.mark.parametrize(
    "path", [*python_sources(), *sorted((SOURCE / "hardware").glob("*.toml"))], ids=lambda path: path.name
)
def test_models_and_hardware_name_no_figure(path):
    text = path.read_text("utf-8")
    found = [name for name in FIGURES if name in text]
    assert not found
    assert not blind_ids().findall(text)
    assert not [row["text"] for row in QUESTIONS if row["text"] in text]


def test_questions_know_no_ids():
    for row in QUESTIONS:
        assert row.keys() <= {"text", "measure", "parameters", "unit", "note"}
        assert not blind_ids().findall(json.dumps(row))


@pytest.mark.parametrize("path", python_sources(), ids=lambda path: path.name)
def test_no_published_value_stands_in_the_models(path):
    """A constant of the code that equals a published value would be that value."""
    published = {float(row["published"]) for row in PUBLISHED} - COMMON
    constants = {
        float(node.value)
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool)
    }
    assert not constants & published


@pytest.mark.parametrize("path", python_sources(), ids=lambda path: path.name)
def test_models_branch_on_no_model_or_gpu(path):
    """Nothing is fitted to one row: no comparison with the name of a model, a GPU or a host."""
    names = re.compile(r"opt-|llama|mixtral|gpt2|a5000|a6000|a100|rtx4080")
    compared = [
        ast.unparse(node)
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Compare | ast.Match | ast.IfExp) and names.search(ast.unparse(node))
    ]
    assert not compared


def test_parameters_of_rows_set_no_constants():
    """Rows pick a workload; no key of theirs is a rate, a share or a time of hardware."""
    keys, asked = set(), [each for row in GIVEN for each in row["values"].values()]
    for row in (*PUBLISHED, *QUESTIONS, *asked):
        waiting = [row["parameters"]]
        while waiting:
            each = waiting.pop()
            keys |= each.keys()
            waiting += [value for value in each.values() if isinstance(value, dict)]
    assert keys <= {"model", "models", "layers", "gpu", "cpu", "ssd", "format", "bits", "over", "ours", "system",
                    "batch",
                    "drives", "drive", "tokens", "dim", "method", "context", "arrangement", "quant", "dies", "part",
                    "selection", "prompt", "gbs", "batches", "percent", "overlap", "gain", "tokens_per_s",
                    "without", "reuse", "multipliers",
                    "years"}  # fmt: skip


BLIND = """
[endor]
rows = [
 {id="a1", model="opt-66b", layers={gpu=5, cpu=14, ssd=45}, format="bitmap", value="@over"},
 {id="a2", model="llama2-70b", layers={gpu=6, cpu=10, ssd=64}, format="dense", value="seconds"},
 {id="a3", model="opt-66b", one_layer="ssd", direct_ssd_gpu=true, format="bitmap", value="speed-up over dense layer"},
]
[instinfer]
rows = [{id="b1", value="SparF 1/8 over dense throughput, batch 256, 1 CSD"}]
[smart_infinity]
rows = [
 {id="c1", model="gpt2-8.4b", gpu="a5000", csds=6, method="SU"},
 {id="c2", model="gpt2-4.0b", gpu="a5000", value="@drives"},
]
[kvnand]
rows = [{id="d1", value="G1 dies of the best D-16, LLaMA3.1-8B, 1K"}]
[other]
rows = [{id="e1"}]
"""
TEXTS = {
    "@over": "speed-up over dense with layers 5/8/51",
    "@drives": "number of SSDs at which the baseline stops gaining more than 5 % per added drive",
}


def blind(tmp_path, text):
    file = tmp_path / "blind.toml"
    for short, long in TEXTS.items():
        text = text.replace(short, long)
    file.write_text(text)
    return file


def test_rows_without_published_values(tmp_path):
    rows = {row["id"]: row for row in predictions(blind(tmp_path, BLIND))}
    assert list(rows) == ["a1", "a2", "a3", "b1", "c1", "c2", "d1"]
    assert all(row.keys() >= {"id", "value", "unit"} and "published" not in row for row in rows.values())
    assert rows["a2"]["unit"] == "s"
    assert rows["c1"]["value"] == pytest.approx(FIGURES["smart-su-low"]["value"])
    assert rows["c2"]["value"] == 4
    assert 1 <= rows["d1"]["value"] <= 15
    dense = measure("pass_seconds", {"model": "opt-66b", "layers": {"gpu": 5, "cpu": 8, "ssd": 51}})
    ours = measure("pass_seconds", {"model": "opt-66b", "layers": {"gpu": 5, "cpu": 14, "ssd": 45}, "format": "bitmap"})
    assert rows["a1"]["value"] == pytest.approx(dense / ours)


@pytest.mark.parametrize("row", QUESTIONS, ids=lambda row: row["text"][:40])
def test_every_question_has_a_value(row):
    own = {"model": "gpt2-4.0b", "gpu": "a5000"} if row["measure"] == "saturation" else {}
    value = measure(row["measure"], row["parameters"] | own)
    assert 0 < value < 1e9
    if row["unit"] == "fraction":
        assert value < 1


@pytest.mark.parametrize(
    "text",
    ["[endor", "", "[endor]\nrows = []", "[endor]\nrows = 3", '[endor]\nrows = [{model = "opt-66b"}]',
     '[endor]\nrows = [{id = "x", model = "opt-66b", layers = {ssd = 1}, format = "dense", value = "watts"}]',
     '[kvnand]\nrows = [{id = "x", value = "what is it"}]', '[kvnand]\nrows = [{id = "x"}]', "[kvnand]\nrows = [1]"],
)  # fmt: skip
def test_files_that_nothing_can_be_made_of(tmp_path, text):
    with pytest.raises(CommandError):
        list(predictions(blind(tmp_path, text)))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(CommandError, match="blind must be a TOML file with rows in endor, instinfer"):
        list(predictions(tmp_path / "none.toml"))


def test_an_unknown_question_is_shown():
    with pytest.raises(CommandError, match=r"measure must be one of pass_seconds, .*, not 'watts'"):
        measure("watts", {})


@pytest.mark.parametrize("name", MEASURES)
def test_parameters_that_a_measure_does_not_take(name):
    with pytest.raises((CommandError, PlanError)):
        measure(name, {"colour": "blue"})


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("pass_seconds", {"model": "opt-66b", "layers": {"ssd": 1}, "format": "zip"}, "format must be dense or bitmap"),
        ("kv_share", {"system": "vllm", "batch": 4}, "system must be instinfer, flexgen"),
        ("decode_rate", {"model": "llama3.1-405b", "context": 10}, "model must be one of"),
        (
            "best_split",
            {"model": "llama3.1-70b", "context": 10, "quant": "w16a16", "dies": 4, "part": "kv"},
            "4 dies must hold llama3.1-70b and 10 tokens in w16a16; they do not",
        ),
    ],
)
def test_values_that_cannot_be(name, parameters, message):
    with pytest.raises(PlanError, match=message):
        measure(name, parameters)
