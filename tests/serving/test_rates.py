"""The measurement of rates beside vLLM's tier of files: both move every block."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-serving/bin/python"


@pytest.mark.full
@pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not there: make test-serving")
def test_a_row_has_rates_of_both(tmp_path):
    command = [PYTHON, Path(__file__).with_name("rates.py"), tmp_path, "--sizes", "65536", "--repeats", "1",
               "--turn-bytes", str(4 << 20)]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT / "host")}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-3000:]
    row = json.loads(run.stdout)
    rates = {name: value for name, value in row.items() if name.endswith("_gb_per_second")}
    assert len(rates) == 6 and all(rate > 0 for rate in rates.values())
    assert not list(tmp_path.iterdir())
