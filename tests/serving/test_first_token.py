"""The measurement of the time to first token: what is asked again comes from the tier's drive."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON, MODEL = ROOT / ".venv-serving/bin/python", ROOT / "tests/data/doclm-7m"


@pytest.mark.full
@pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not there: make test-serving")
def test_a_prompt_that_is_asked_again_is_loaded(tmp_path):
    script = Path(__file__).with_name("first_token.py")
    command = [
        PYTHON,
        script,
        MODEL,
        tmp_path,
        "--lengths",
        "256",
        "--repeats",
        "2",
        "--tier",
        "nearflash",
        "--buffered",
    ]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'host'}{os.pathsep}{script.parent}", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    rows = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"bench"')]
    assert [(row["turn"], row["cached_tokens"]) for row in rows] == [("first", 0), ("second", 256)]
    assert all(0 < row["least_s"] <= row["median_s"] <= row["most_s"] for row in rows)
    assert not list(tmp_path.iterdir())
