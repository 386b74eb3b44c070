"""Files of texts and questions, and what a model makes of them."""

import math
from pathlib import Path

import pytest

pytest.importorskip("accelerate")

from nearflash.abi.errors import CommandError
from nearflash.weights.evaluate import Question, evaluate, read_evaluation
from nearflash.weights.pretrained import load_pretrained

DATA = Path(__file__).parents[1] / "data"


def test_fields_of_several_tasks_are_read():
    found = read_evaluation(DATA / "questions.jsonl")
    assert len(found.texts) == 2 and [question.right for question in found.questions] == [0] * 4
    assert found.questions[0].choices == ("cannot", "sings", "boils")
    assert found.questions[2] == Question("Which type maps keys to values?", ("a dictionary", "a float"), 0)


def test_other_ends_of_lines_belong_to_the_text(tmp_path):
    """Once a line separator in a string, as JSON allows it, ended the object."""
    (tmp_path / "some.jsonl").write_text('{"text": "a\u2028b"}\n{"text": "c"}\n', encoding="utf-8")
    assert read_evaluation(tmp_path / "some.jsonl").texts == ("a\u2028b", "c")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 must be a text or a question"),
        ("[1]", "it is no object"),
        ('{"query": "a"}', "line 2 must be"),
        ('{"query": "a", "choices": ["b"], "gold": 0}', "two choices or more"),
        ('{"query": "a", "choices": ["b", "c"], "gold": 2}', "the right choice must be one of 2, not 2"),
        ('{"query": "a", "choices": ["b", "c"]}', "line 2 must be"),
        ('{"text": ""}', "line 2 must be"),
    ],
)
def test_other_lines_are_named(tmp_path, line, message):
    (tmp_path / "some.jsonl").write_text('{"text": "a"}\n' + line + "\n")
    with pytest.raises(CommandError, match=message):
        read_evaluation(tmp_path / "some.jsonl")


def test_files_with_nothing_are_named(tmp_path):
    (tmp_path / "none.jsonl").write_text("\n")
    for name, message in (("none.jsonl", "must have a text or a question"), ("gone.jsonl", "must be a readable UTF-8")):
        with pytest.raises(CommandError, match=message):
            read_evaluation(tmp_path / name)


def test_a_model_prefers_what_its_texts_have():
    model, tokenizer = load_pretrained(DATA / "doclm-7m")
    found = evaluate(model, tokenizer, read_evaluation(DATA / "questions.jsonl"))
    assert found["accuracy"] == found["accuracy_norm"] == 1 and 2 < found["perplexity"] < 200
    wrong = Question("A list can be changed after it was made; a tuple", ("cannot", "sings"), 1)
    shares = evaluate(model, tokenizer, read_evaluation(DATA / "questions.jsonl").__class__((), (wrong,)))
    assert shares == {"accuracy": 0, "accuracy_norm": 0}


def test_perplexity_is_that_of_every_token_but_the_first():
    model, tokenizer = load_pretrained(DATA / "doclm-7m")
    text = read_evaluation(DATA / "questions.jsonl").texts[0]
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    loss = model(ids, labels=ids).loss.item()
    found = evaluate(model, tokenizer, read_evaluation(DATA / "questions.jsonl").__class__((text,), ()))
    assert math.log(found["perplexity"]) == pytest.approx(loss, rel=1e-4)
