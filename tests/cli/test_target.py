"""`nearflash compress --target`."""

import argparse
import json
from pathlib import Path

import pytest

pytest.importorskip("accelerate")

import torch
import transformers

from nearflash.cli.main import main
from nearflash.cli.target import parse_target
from nearflash.weights.pretrained import load_tokenizer

DATA = Path(__file__).parents[1] / "data"
WINDOWS = ("--tokens", "32", "--windows", "2")


@pytest.fixture
def model(tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=8192, hidden_size=64, intermediate_size=512, num_hidden_layers=2,
                                      num_attention_heads=2, tie_word_embeddings=True, dtype="float16")  # fmt: skip
    transformers.LlamaForCausalLM(config).half().save_pretrained(tmp_path / "big")
    load_tokenizer(DATA / "doclm-7m").save_pretrained(tmp_path / "big")
    (tmp_path / "text.txt").write_text("The list is sorted in place, and the tuple is not. " * 60)
    return tmp_path / "big"


def run(model, target, *options):
    output, texts = str(model.parent / "small"), ("--texts", str(model.parent / "text.txt"))
    return main(["compress", str(model), "--target", target, "-o", output, *texts, *WINDOWS, *options])


@pytest.mark.parametrize("target", ["0.75", "+0.01"])
def test_targets_are_reached_as_measured(model, capsys, target):
    assert run(model, target, "--evaluate", str(DATA / "questions.jsonl")) == 0
    report = json.loads((model.parent / "small/compression.json").read_text())
    if target == "0.75":
        assert report["bytes_fraction_of_dense"] <= 0.75
    assert report["perplexity"]["after"] <= report["perplexity"]["before"] * 1.02
    chosen = [row for row in report["target"]["layers"] if row["chosen"]]
    assert [row["layer"] for row in chosen] == [0, 1] and any(row["choice"] != "lossless" for row in chosen)
    assert set(report["evaluation"]) == {"before", "after"} and "accuracy" in report["evaluation"]["after"]
    out, err = capsys.readouterr()
    assert "layer  method" in out and "evaluation after: perplexity" in out
    assert "search: 9 forms of 2 layers, about " in err and "measured 9/9" in err and "pruned 2/2" in err


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("0.1", (), "MB or more for this model, not 0.1, 0."),
        ("1kB", (), "must be a share below 1, a size like 500MB, or a loss like +0.02"),
        ("0.7", ("--bits", "8"), "bits must be left out with --target"),
    ],
)
def test_targets_out_of_reach_write_nothing(model, capsys, target, options, message):
    try:
        assert run(model, target, *options) == 2
    except SystemExit as error:
        assert error.code == 2
    assert message in capsys.readouterr().err and not (model.parent / "small").exists()


def test_what_misses_its_target_is_removed(model, monkeypatch, capsys):
    monkeypatch.setattr("nearflash.cli.compress._measure", lambda *_: next(losses))
    losses = iter([10.0, 11.0])
    assert run(model, "+0.02") == 2
    assert "target must be +0.0953 or more" in capsys.readouterr().err and not (model.parent / "small").exists()


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_leaves_nothing(model, monkeypatch, when):
    def interrupt(*_):
        if when == "before" or (model.parent / "small").exists():
            raise KeyboardInterrupt
        return 10.0

    monkeypatch.setattr("nearflash.cli.compress._measure", interrupt)
    assert run(model, "0.95") == 130
    assert not (model.parent / "small").exists()


def test_a_size_that_lossless_forms_have_needs_no_search(model, capsys):
    """Regression: nothing is calibrated, or measured, where all weights may stay as they are."""
    assert run(model, "0.97") == 0
    out, err = capsys.readouterr()
    assert "search:" not in err and "measured" not in err and out.count("none ") == 2 and "(+0.0000 nats" in out


def test_targets_are_parsed():
    assert (parse_target("0.5").fraction, parse_target("+0.02").loss) == (0.5, 0.02)
    assert [parse_target(text).bytes for text in ("500MB", "1.5GiB", "100B")] == [5e8, 1.5 * 2**30, 100]
    for text in ("0", "1", "-0.1", "+nan", "+inf", "nan", "5M", "MB", ""):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_target(text)
