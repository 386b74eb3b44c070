import argparse
import subprocess
import sys

import pytest

import nearflash.inference.cli
from nearflash.cli import main as cli


def run(capsys, *argv):
    code = cli.main(argv)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_prompts_are_continued(capsys, tmp_path, doclm_folder):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("The committee met in the spring\n\nWater\n")
    settings = ("generate", "--model", str(doclm_folder), "--prompts", str(prompts), "--max-new-tokens", "4")
    code, out, err = run(capsys, *settings)
    assert code == 0 and out.startswith("The committee met in the spring") and "\nWater" in out
    assert "token 4/4  " in err and "\n8 tokens: prefill" in err and " MB of flash a token, in all token " in err
    page = run(capsys, *settings, "--attention", "sparf-page", "--score-dims", "64", "--top-k", "0.1",
               "--num-devices", "2", "--path", str(tmp_path / "kv"), "--mini-batches", "2", "--dtype", "fp16",
               "--threads", "1")  # fmt: skip
    assert page[:2] == (0, out) and (tmp_path / "kv.1").exists()


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
    code, _, err = run(capsys, "generate", "--model", "x", "--prompts", str(prompts), "--top-k", "0.0")
    assert code == 2 and "top_k must be a count from 1 or a fraction" in err


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
    monkeypatch.setattr(nearflash.inference.cli, "find_spec", lambda name: name != "transformers")
    with pytest.raises(ModuleNotFoundError) as raised:
        nearflash.inference.cli.generate(argparse.ArgumentParser().add_subparsers())
    assert raised.value.name == "transformers"


@pytest.mark.parametrize(
    "size, size_bytes", [("0", 0), ("4096", 4096), ("3k", 3 << 10), ("512M", 512 << 20), ("2G", 2 << 30)]
)
def test_cache_size_is_a_number_of_bytes(size, size_bytes):
    assert nearflash.inference.cli._size(size) == size_bytes


@pytest.mark.parametrize("size", ["", "G", "-1", "1.5G", "3T"])
def test_another_cache_size_is_rejected(capsys, size):
    with pytest.raises(SystemExit):
        cli.main(["generate", "--model", "x", "--prompts", "y", f"--cache-size={size}"])
    assert f"must be a number of bytes such as 512M or 2G, not {size!r}" in capsys.readouterr().err
