"""The conformance table of the guide is what the optimizers do; and the check notices what differs."""

from contextlib import suppress
from pathlib import Path

import pytest
import torch

from nearflash.training import conformance
from nearflash.training.checks.__main__ import main

GUIDE = Path(__file__).parents[2] / "docs" / "reference" / "conformance.md"


@pytest.mark.full
def test_the_table_of_the_guide(capsys):
    assert main() == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [line for line in GUIDE.read_text().splitlines() if line.startswith("|")] == rows
    assert not any("differs" in row for row in rows)


def test_torch_is_as_torch():
    def adam(params):
        return torch.optim.Adam(params, lr=0.01)

    assert {row.outcome for row in conformance(adam, adam)} == {"as torch"}


def test_no_thread_of_a_process_group_can_hang_the_check():
    """Gloo's, destroyed after a backward pass, waited with Python's lock held for a thread that needed the lock."""
    names = set()

    def note(*_):
        for thread in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # it has ended
                names.add((thread / "comm").read_text())

    def adam(params):
        optimizer = torch.optim.Adam(params, lr=0.01)
        optimizer.register_step_pre_hook(note)
        return optimizer

    conformance(adam, adam)
    assert names and not any("gloo" in name for name in names)


def test_what_differs_is_noticed():
    rows = conformance(lambda p: torch.optim.Adam(p, lr=0.02), lambda p: torch.optim.Adam(p, lr=0.01))
    assert rows[0].outcome == "differs" and "tensor 0 by up to 0.0" in rows[0].detail
    rows = conformance(lambda p: torch.optim.SparseAdam(p, lr=0.01), lambda p: torch.optim.Adam(p, lr=0.01))
    assert rows[0].outcome == "differs" and "RuntimeError" in rows[0].detail
