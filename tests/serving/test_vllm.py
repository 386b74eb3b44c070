"""vLLM itself, on processors: a run of it for each test, with its tokens as they are without the tier."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON, MODEL = ROOT / ".venv-serving/bin/python", ROOT / "tests/data/doclm-7m"
PROMPTS = [[7 + 3 * at + number for at in range(400)] for number in range(4)]
BLOCKS = 12 * len(PROMPTS)
"""Whole blocks, of 32 tokens, of the prompts."""
CACHED = 352
"""Tokens of a prompt that are not computed where all of its blocks but the last are there."""
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not there: make test-serving"),
]


def start(steps, tier=None, model=MODEL):
    text = "" if tier is None else json.dumps(tier)
    command = [PYTHON, Path(__file__).with_name("engine.py"), model, text, json.dumps(steps)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'host'}{os.pathsep}{Path(__file__).parent}"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def generate(steps, tier=None, model=MODEL):
    """Tokens, the cached ones' counts, and the tier's counts of a process."""
    process = start(steps, tier, model)
    try:
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, err[-3000:]
    return json.loads(out.splitlines()[-1])


def tier_in(folder, **options):
    return {"type": "NearflashTier", "module_path": "nearflash.serving.vllm", "path": str(folder),
            "capacity_bytes": 64 << 20, "direct": False, "deadline_s": 60} | options  # fmt: skip


def is_answer(line):
    return line.startswith('{"tokens"')


@pytest.fixture(scope="module")
def plain():
    return generate(PROMPTS)["tokens"]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A folder, and the run that stored there; it asked the first prompt again when memory had forgotten it."""
    folder = tmp_path_factory.mktemp("tier")
    return folder, generate([*PROMPTS, PROMPTS[0]], tier_in(folder))


def test_what_memory_forgot_is_loaded_from_the_tier(plain, stored):
    _, run = stored
    assert run["tokens"] == [*plain, plain[0]]
    assert run["cached"][:4] == [0] * 4 and run["cached"][4] >= CACHED
    assert run["store"]["stored"] == BLOCKS and run["store"]["hits"] >= 11


def test_what_was_stored_is_found_after_a_restart(plain, stored):
    again = generate(PROMPTS, tier_in(stored[0]))
    assert again["tokens"] == plain and all(tokens >= CACHED for tokens in again["cached"])
    assert again["store"]["stored"] == 0


def test_flipped_bits_are_misses(plain, stored, tmp_path):
    (path,) = shutil.copytree(stored[0], tmp_path / "flipped").glob("*.blocks")
    data = bytearray(path.read_bytes())
    for at in range(1 << 14, len(data), 4001):
        data[at] ^= 1
    path.write_bytes(data)
    found = generate(PROMPTS, tier_in(path.parent))
    assert found["tokens"] == plain and sum(found["cached"]) == 0


def test_another_model_in_one_folder_has_no_hits(plain, stored, tmp_path):
    other = shutil.copytree(MODEL, tmp_path / "other")
    found = generate(PROMPTS, tier_in(stored[0]), other)
    assert found["tokens"] == plain and found["cached"] == [0] * 4
    assert found["store"]["stored"] == BLOCKS and len(list(stored[0].glob("*.blocks"))) == 2


def test_killed_in_the_middle_of_stores_and_beyond_its_capacity(plain, tmp_path):
    tier = tier_in(tmp_path, capacity_bytes=12 << 20)
    process = start(["slow", *PROMPTS], tier)
    answered = [line for _, line in zip(range(2), filter(is_answer, process.stdout), strict=False)]
    process.kill()
    process.communicate()
    assert len(answered) == 2
    (path,) = tmp_path.glob("*.blocks")
    found = generate([*PROMPTS, PROMPTS[0]], tier)
    assert found["tokens"] == [*plain, plain[0]]
    assert found["store"]["evicted"] > 0 and found["store"]["damaged"] == 0
    assert path.stat().st_size <= 12 << 20 and list(tmp_path.iterdir()) == [path]


def test_a_slow_drive_costs_hits_as_memory_waits_for_it(plain, tmp_path):
    """vLLM's own memory is full of blocks on their way to the tier: later ones are not offered to it at all."""
    run = generate(["slow", *PROMPTS], tier_in(tmp_path))
    assert run["tokens"] == plain
    assert run["store"]["stored"] < BLOCKS and (run["store"]["refused"], run["store"]["expired"]) == (0, 0)


def test_a_removed_file_and_a_full_disk_leave_the_engine_what_was_durable(plain, tmp_path):
    run = generate([PROMPTS[0], "remove", PROMPTS[1], "full", *PROMPTS[2:], PROMPTS[0]], tier_in(tmp_path))
    assert run["tokens"] == [*plain, plain[0]] and not list(tmp_path.iterdir())
    assert (run["store"]["failed_drives"], run["store"]["blocks"]) == (1, BLOCKS // 2) and run["store"]["refused"] > 0
    assert run["cached"][-1] > 0, "what was durable before is served"
