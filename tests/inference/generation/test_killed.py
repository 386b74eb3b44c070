"""`nearflash generate`, killed: what its page file holds afterwards is whole."""

import re
import subprocess
import sys
import time

import pytest

from nearflash.cli.main import main


@pytest.fixture
def generation(tmp_path, doclm_folder):
    """A generation under way, and its page file."""
    prompts, path = tmp_path / "prompts.txt", tmp_path / "kv"
    prompts.write_text("".join(f"{'The committee met again in the spring. ' * (90 + i)}\n" for i in range(8)))
    command = [sys.executable, "-c", "from nearflash.cli.main import main; main()", "generate", "--model",
               str(doclm_folder), "--prompts", str(prompts), "--max-new-tokens", "40", "--path", str(path)]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    yield process, path
    process.kill()
    process.communicate(timeout=60)


def programmed(path):
    """True once the file holds some pages: more than the first write, which may be under way still."""
    return path.exists() and sum(map(bool, path.read_bytes()[:: 1 << 10])) > 12_000


@pytest.mark.full
def test_in_prefill(generation, capsys):
    process, path = generation
    end = time.monotonic() + 100
    while not programmed(path):
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.01)
    process.kill()
    assert "token " not in process.communicate(timeout=60)[1]
    assert whole_pages(path, capsys) > 0


@pytest.mark.full
def test_in_decode(generation, capsys):
    process, path = generation
    for line in process.stderr:
        if line.startswith("token 16/"):
            break
    process.kill()
    assert "token 40/" not in process.communicate(timeout=60)[1]
    assert whole_pages(path, capsys) > 0


def whole_pages(path, capsys):
    assert main(["kv", "verify", str(path)]) == 0
    whole, torn = re.search(r": (\d+) pages valid, \d+ erased, (\d+) torn", capsys.readouterr().out).groups()
    assert torn == "0"
    return int(whole)
