"""`nearflash calibrate`: a file that generate finds, an interrupted run continued, wrong input named."""

import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from nearflash.cli import main as cli
from nearflash.inference.calibration import calibration
from nearflash.inference.calibration.choose import UNIFORM, model_digest
from nearflash.inference.policy.files import PolicyFile, own_folder
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.inference.setup import default_layout

DOCLM = Path(__file__).parents[2] / "data" / "doclm-7m"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(calibration, "_STEP", 128)
    monkeypatch.setattr(calibration, "_DRAWS", 1)
    return own_folder()


@pytest.fixture
def text(tmp_path):
    """Of 1,400 tokens of the model's own words."""
    tokenizer = AutoTokenizer.from_pretrained(DOCLM)
    path = tmp_path / "text.txt"
    path.write_text(tokenizer.decode([7 * i % 5000 + 300 for i in range(2500)]))
    return path


def run(capsys, *argv):
    code = cli.main(["calibrate", "--model", str(DOCLM), *map(str, argv)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_calibration_is_found_by_generate(capsys, text, home, monkeypatch):
    given = ("--texts", text, "--tokens", "1400", "--fraction", "0.5", "--threads", "1")
    code, out, err = run(capsys, *given)
    (path,) = home.iterdir()
    assert code == 0 and out.startswith(f"{path}: 0.") and "window 2/2 of 1280 tokens" in err
    own = PolicyFile.read(path)
    assert own.model == "doclm-7m" and own.flash_fraction <= 0.5 and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "nearflash calibrate --model doclm-7m --fraction 0.5 --texts text.txt" in own.made_by
    code = cli.main(["generate", "--model", str(DOCLM), text.read_text()[:8000], "--max-new-tokens", "2",
                     "--threads", "1"])  # fmt: skip
    assert code == 0 and f"policy: {path}, calibrated for doclm-7m" in capsys.readouterr().err


@pytest.mark.full
def test_an_interrupted_run_is_continued(capsys, text, tmp_path, monkeypatch):
    given, output = ("--texts", text, "--tokens", "1400", "--threads", "1"), tmp_path / "policy.json"
    assert run(capsys, *given, "-o", tmp_path / "whole.json")[0] == 0
    add, added = calibration.Calibration.add, []

    def stopping(self, *arguments):
        if added:
            raise KeyboardInterrupt
        added.append(1)
        add(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(calibration.Calibration, "add", stopping)
        assert run(capsys, *given, "-o", output)[0] == 130
    partial = tmp_path / "policy.json.partial.npz"
    assert partial.exists() and not output.exists() and stat.S_IMODE(partial.stat().st_mode) == 0o600
    kept = partial.read_bytes()
    partial.write_bytes(kept[:-40])
    code, _, err = run(capsys, *given, "-o", output)
    assert code == 2 and "must be what an interrupted calibration kept" in err
    partial.write_bytes(kept)
    code, _, err = run(capsys, *given, "-o", output)
    assert code == 0 and "continued after 1 of 2 windows" in err and not partial.exists()
    bodies = [json.loads(path.read_text()) for path in (output, tmp_path / "whole.json")]
    assert bodies[0] == bodies[1]


def test_wrong_input_is_named_and_nothing_written(capsys, text, tmp_path):
    (tmp_path / "short.txt").write_text("few words")
    (tmp_path / "other.json").write_text("{}")
    model = AutoModelForCausalLM.from_pretrained(DOCLM)
    base = AttentionPolicy("sparf-page", score_dims=8, top_p=0.5)
    table = replace(base, overrides={(layer, head): base for layer in range(6) for head in range(2)})
    layout = default_layout(128, UNIFORM, 1 << 20)
    tuned = PolicyFile("doclm", model_digest(model.config), table, layout, 0.1, 0.1, "a test", {"float32": "tuned"})
    tuned.write(tmp_path / "tuned.json")
    for argv, match in (
        (("--texts", text, "--fraction", "1.5"), "fraction must be above 0 and at most 1, not 1.5"),
        (
            ("--texts", text, "--tokens", "1279"),
            "tokens must be 1280 at least, a block of the index and the 256 that are",
        ),
        (("--texts", tmp_path / "short.txt"), "texts must have 4096 tokens at least"),
        (("--texts", tmp_path / "none.txt"), "texts must be readable UTF-8 files"),
        (("--texts", text, "-o", tmp_path / "other.json"), "other.json must be an object of version"),
        (("--texts", text, "-o", tmp_path / "tuned.json"), "output must be of these weights"),
    ):
        code, _, err = run(capsys, *argv)
        assert code == 2 and match in err
    assert (tmp_path / "other.json").read_text() == "{}"
    assert PolicyFile.read(tmp_path / "tuned.json").weights == tuned.weights
