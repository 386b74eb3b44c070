"""DeepSpeed's engine (ZeRO-1 and 2) with a client optimizer of ours: the loop unchanged, two ranks of gloo."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from nearflash.bench.training.train import BASELINE

WORKER = Path(__file__).with_name("deepspeed_worker.py")


# Without `make baseline` test_late.py guards it: tensors that are replaced before the files are open.
@pytest.mark.full
@pytest.mark.skipif(
    not (BASELINE / ".stamp").exists(), reason=f"DeepSpeed is not installed in {BASELINE}: make baseline"
)
def test_two_ranks_under_the_engine_are_as_with_torchs_optimizer(tmp_path):
    ranks = [
        subprocess.Popen([str(BASELINE / "bin" / "python"), str(WORKER), str(rank), str(tmp_path)],
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                         env=os.environ | {"OMP_NUM_THREADS": "1"})
        for rank in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=200)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], said
    found = [json.loads((tmp_path / f"found{rank}.json").read_text()) for rank in range(2)]
    norms = [row.pop("norm") for row in found]
    assert norms[0] == norms[1] > 0
    for row in found:
        assert len(row) == 4
        for name, (steps, difference) in row.items():
            assert steps == 4 and difference < (1e-6 if "fp32" in name else 1e-2), (name, difference)
