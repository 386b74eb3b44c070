"""Training, attention and weights through the drivers of boards: the bits are the model's.

A model of 7 million parameters makes a minute of each; `make drivers` runs them, for pynq in its own environment.
"""

from pathlib import Path

import numpy as np
import pytest

from nearflash.device import open_device
from nearflash.device.selftest.attend import compare_heads
from nearflash.device.selftest.expand import MATRIX_FORMATS, compare_matrices

MODEL = Path(__file__).parents[2] / "data/doclm-7m"

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]


def gradients():
    """Of every parameter, for fixed tokens: made once, as torch's bits are not the same every time."""
    import torch

    from nearflash.inference.models import load_model

    model, _ = load_model(MODEL)
    tokens = torch.arange(64).reshape(1, -1) % model.config.vocab_size
    model(input_ids=tokens, labels=tokens).loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def one_step(device, path, gradients):
    """Bits of the parameters and of p, m, v after a step."""
    from nearflash.inference.models import load_model
    from nearflash.training import NearStorageAdamW

    model, _ = load_model(MODEL)
    options = {"lr": 1e-3, "weight_decay": 0.1, "extent_params": 1 << 19}
    with NearStorageAdamW(model.parameters(), path=path, device=device, **options) as optimizer:
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        state = [np.asarray(optimizer.store.read_array(name)).tobytes() for name in "pmv"]
        counted = optimizer.report.traffic.params
    return state, [parameter.detach().float().numpy().tobytes() for parameter in model.parameters()], counted


def test_a_training_step_of_a_language_model(open_tiny, tmp_path):
    given = gradients()
    with open_device("model:update-tiny") as model:
        expected = one_step(model, tmp_path / "model", given)
    with open_tiny("update-tiny") as device:
        found = one_step(device, tmp_path / "board", given)
        down, up = device.links.to_device, device.links.from_device
    assert found == expected
    assert found[2] > 1_000_000 and 0 < up <= down < 40 * found[2]


def test_a_batch_of_heads(open_tiny):
    with open_tiny("attend-tiny") as device:
        rows = list(compare_heads(device, tokens=100, seed=1))
    assert len(rows) > 10 and sum(row.words for row in rows) > 1000
    assert not any(row.mismatches for row in rows)


def test_weights_of_every_format(open_tiny):
    with open_tiny("expand-tiny") as device:
        rows = list(compare_matrices(device, columns=600, seed=1))
    assert len(rows) == 3 * len(MATRIX_FORMATS) and all(row.words == 5 * 600 for row in rows)
    assert not any(row.mismatches for row in rows)
