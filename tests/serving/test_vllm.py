"""vLLM itself, on processors: a run of it for each test, with its tokens as they are without the tier."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON, MODEL = ROOT / ".venv-serving/bin/python", ROOT / "tests/data/doclm-7m"
PROMPTS = [[7 + 3 * at + number for at in range(400)] for number in range(4)]
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not there: make test-serving"),
]


def generate(tier=None):
    """Tokens and the tier's counts of a process that is given PROMPTS."""
    text = "" if tier is None else json.dumps(tier)
    command = [PYTHON, Path(__file__).with_name("engine.py"), MODEL, text, json.dumps(PROMPTS)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'host'}{os.pathsep}{Path(__file__).parent}"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def plain():
    return generate()["tokens"]


@pytest.fixture
def tier(tmp_path):
    return {"type": "NearflashTier", "module_path": "nearflash.serving.vllm", "path": str(tmp_path),
            "capacity_bytes": 64 << 20, "direct": False, "deadline_s": 60}  # fmt: skip


def test_what_was_stored_is_found_after_a_restart(tier, plain):
    first, again = generate(tier), generate(tier)
    assert first["tokens"] == again["tokens"] == plain
    assert first["cached"] == [0] * 4 and all(tokens >= 352 for tokens in again["cached"])


def test_flipped_bits_are_misses(tier, plain, tmp_path):
    generate(tier)
    (path,) = tmp_path.glob("*.blocks")
    data = bytearray(path.read_bytes())
    for at in range(1 << 14, len(data), 4001):
        data[at] ^= 1
    path.write_bytes(data)
    found = generate(tier)
    assert found["tokens"] == plain and sum(found["cached"]) == 0


def test_another_namespace_has_no_hits(tier, plain):
    generate(tier | {"namespace": "one"})
    found = generate(tier | {"namespace": "other"})
    assert found["tokens"] == plain and sum(found["cached"]) == 0
