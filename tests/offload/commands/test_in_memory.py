"""`nearflash generate` with everything in memory: what it prints, and what it refuses."""

import argparse
import io
import subprocess
import sys
from pathlib import Path

import pytest

from nearflash.cli import main as cli
from nearflash.inference.commands import console
from nearflash.inference.commands.console import estimate
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.offload.commands import generate
from nearflash.offload.commands.options import _size
from nearflash.storage.io.measure import Rate
from nearflash.storage.io.profile import DriveProfile, keep_profile
from nearflash.storage.kv import KvShape

MODEL = Path(__file__).parents[2] / "data/doclm-7m"


def run(capsys, *argv):
    code = cli.main(argv)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_prompts_are_continued(capsys, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("The committee met in the spring\n\nWater\n")
    settings = ("generate", "--model", str(MODEL), "--prompts", str(prompts), "--max-new-tokens", "4")
    code, out, err = run(capsys, *settings)
    assert code == 0 and out.startswith("The committee met in the spring") and "\nWater" in out
    assert "token 4/4  " in err and "\n8 tokens: prefill" in err and "no flash was read" in err
    page = run(capsys, *settings, "--attention", "sparf-page", "--score-dims", "64", "--top-k", "0.1",
               "--num-devices", "2", "--path", str(tmp_path / "kv"), "--mini-batches", "2", "--dtype", "fp16",
               "--threads", "1")  # fmt: skip
    assert page[:2] == (0, out) and (tmp_path / "kv.1").exists()
    prompts.write_text("The committee met in the spring. " * 170)
    _, _, err = run(capsys, *settings, "--attention", "dense")
    assert " MB of flash a token, in all token " in err


def test_errors_say_what_to_do(capsys, tmp_path):
    prompts = tmp_path / "prompts.txt"
    code, _, err = run(capsys, "generate", "--model", "x", "--prompts", str(prompts))
    assert code == 2 and err.startswith("nearflash: prompts must be in a readable file, not ")
    prompts.write_text("\n")
    code, _, err = run(capsys, "generate", "--model", "x", "--prompts", str(prompts))
    assert code == 2 and "must be at least one line of" in err
    prompts.write_text("Water\n")
    code, _, err = run(capsys, "generate", "--model", "x", "--prompts", str(prompts))
    assert code == 2 and "model must be smollm2 or a folder" in err
    given = ("generate", "--model", "x", "--prompts", str(prompts))
    for options, match in (
        (("--attention", "sparf", "--top-k", "0.0"), "top_k must be a count from 1 or a fraction"),
        (("--top-k", "0.5", "--keep-tail"), "top_k, keep_tail must be given with --attention, whose settings they are"),
        (("--attention", "dense", "--policy", "auto"), "policy must be left out where attention is given"),
        (("--sampling-top-p", "0.5"), "sampling_top_p must be given with a temperature above 0"),
        (("--temperature", "1", "--sampling-top-p", "2"), "sampling_top_p must be above 0 and at most 1, not 2.0"),
        (("--temperature", "1", "--mini-batches", "2"), "mini_batches must be 1 where tokens are drawn"),
        (("Water",), "prompts must be left out where a prompt is given"),
    ):
        code, _, err = run(capsys, *given, *options)
        assert code == 2 and match in err
    prompts.write_text("Water\nFire\n")
    code, _, err = run(capsys, *given, "--stream")
    assert code == 2 and "stream must be of one prompt, not of 2" in err


def test_a_prompt_from_an_argument_or_standard_input(capsys, monkeypatch):
    settings = ("generate", "--model", str(MODEL), "--max-new-tokens", "4")
    code, out, err = run(capsys, *settings, "Water is")
    assert code == 0 and out.startswith("Water is") and "token 4/4" in err
    assert "policy: dense, as no sequence exceeds 1024 tokens" in err and "MB are written to a temporary file" in err
    monkeypatch.setattr(sys, "stdin", io.StringIO("Water is\n"))
    assert run(capsys, *settings)[:2] == (0, out)
    streamed = run(capsys, *settings, "Water is", "--stream")
    assert streamed[0] == 0 and streamed[1].strip() == out.strip() and "token 4/4" not in streamed[2]
    for text, match in (("  \n", "prompt must be a text, not empty"), (None, "prompt must be given: as an argument")):
        terminal = io.StringIO(text or "")
        terminal.isatty = lambda text=text: text is None
        monkeypatch.setattr(sys, "stdin", terminal)
        code, _, err = run(capsys, *settings)
        assert code == 2 and match in err


def test_a_seed_decides_what_is_sampled(capsys):
    settings = ("generate", "--model", str(MODEL), "Water is", "--max-new-tokens", "8", "--temperature", "2")
    texts = [run(capsys, *settings, "--seed", seed)[1] for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("drawn", [(), ("--temperature", "0")])
def test_a_seed_where_nothing_is_drawn_is_refused(capsys, drawn):
    """It was ignored, and each seed gave the same text."""
    code, _, err = run(capsys, "generate", "--model", str(MODEL), "Water is", "--seed", "1", *drawn)
    assert code == 2 and "--seed must be given with a temperature above 0: else nothing is drawn" in err


@pytest.mark.parametrize(("rates", "seconds"), [((3.0, 1.0), 0.246), ((3.0, 3.0), 0.246), ((3.0, 0.5), 0.492)])
def test_the_estimate_names_all_files_and_the_slowest_drive(tmp_path, monkeypatch, rates, seconds):
    """Of two files the first was named alone, with its drive's rate for all bytes. Equal rates: one drive has both."""
    folders = [tmp_path / "a", tmp_path / "b"]
    profiles = {
        folder: DriveProfile("2026-02-03", (Rate("read", 1 << 20, 2, rate, rate, rate),))
        for folder, rate in zip(folders, rates, strict=True)
    }
    for folder in folders:
        folder.mkdir()
    monkeypatch.setattr(console, "find_profile", profiles.get)
    files = [folder / "kv" for folder in folders]
    first, known = estimate(KvShape(30, 3, 64), AttentionPolicy(), 32000, 4, files, (2.0, 1.0))
    assert f"to {files[0]} (" in first and f" and {files[1]} (" in first and first.count("GB are free there") == 2
    assert f"(measured 2026-02-03) reading all K and V would take {seconds} s a token" in known


def test_the_estimate_names_rates_that_were_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    shape, policy = KvShape(30, 3, 64), AttentionPolicy("sparf-page")
    first, unknown = estimate(shape, policy, 32000, 4, [tmp_path / "kv"])
    assert first.startswith("K and V of up to 32000 tokens x 4: up to 3317.8 MB are written to ") and "kv (" in first
    assert (
        unknown == f"the drive's rates are not known: nearflash devices --measure {tmp_path} keeps them for estimates"
    )
    keep_profile(tmp_path, [Rate("read", 1 << 20, 2, 3.0, 3.0, 3.0)], "2026-02-03")
    _, known = estimate(shape, policy, 32000, 4, [tmp_path / "kv"])
    assert known.startswith("at its 3.0 GB/s (measured 2026-02-03) reading all K and V would take 0.246 s a token")
    assert len(list(estimate(shape, policy, 100, 1, [None]))) == 1


def test_prompts_that_are_not_utf_8(capsys, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_bytes(b"Water \xff\n")
    code, _, err = run(capsys, "generate", "--model", "x", "--prompts", str(prompts))
    assert code == 2 and err.startswith("nearflash: prompts must be UTF-8, but byte 6 of ")


@pytest.mark.parametrize(
    "option", ["--max-new-tokens", "--mini-batches", "--threads", "--num-devices", "--local-window", "--min-tokens"]
)
def test_counts_that_mean_nothing(capsys, option):
    with pytest.raises(SystemExit) as raised:
        cli.main(["generate", "--model", "x", "--prompts", "y", option, "-1"])
    assert raised.value.code == 2
    assert f"argument {option}: must be a whole number, " in capsys.readouterr().err


def test_the_command_alone_loads_no_torch():
    script = "import sys; from nearflash.cli.main import main; main(['devices']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_without_its_packages_there_is_no_command(monkeypatch):
    monkeypatch.setattr(generate, "find_spec", lambda name: name != "transformers")
    with pytest.raises(ModuleNotFoundError) as raised:
        generate.generate(argparse.ArgumentParser().add_subparsers())
    assert raised.value.name == "transformers"


@pytest.mark.parametrize(
    "size, size_bytes", [("0", 0), ("4096", 4096), ("3k", 3 << 10), ("512M", 512 << 20), ("2G", 2 << 30)]
)
def test_cache_size_is_a_number_of_bytes(size, size_bytes):
    assert _size(size) == size_bytes


@pytest.mark.parametrize("size", ["", "G", "-1", "1.5G", "3T"])
def test_another_cache_size_is_rejected(capsys, size):
    with pytest.raises(SystemExit):
        cli.main(["generate", "--model", "x", "--prompts", "y", f"--cache-size={size}"])
    assert f"must be a number of bytes such as 512M or 2G, not {size!r}" in capsys.readouterr().err
