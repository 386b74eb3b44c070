"""The demo's model."""

from pathlib import Path

import pytest
import torch
from transformers.utils import logging

from nearflash.demo.data import load_model

DOCLM = Path(__file__).parents[1] / "data" / "doclm-7m"


@pytest.mark.parametrize("asked", [False, True])
def test_loading_leaves_transformers_as_it_was(monkeypatch, capfd, asked):
    """Regression: progress bars of all later loads were gone, and a test of them failed behind the demo's."""
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "0" if asked else "1")
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    assert before[1]
    load_model(DOCLM, torch.float32)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    assert ("Loading weights" in capfd.readouterr().err) is asked
