"""Bit errors in stored bytes, and rows of their losses."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("accelerate")

import torch

from nearflash.bench.weights import errors
from nearflash.bench.weights.errors import BitErrors
from nearflash.bench.weights.sizes import SizesSettings
from nearflash.weights.pretrained import load_model

DOCLM = Path(__file__).parents[2] / "data" / "doclm-7m"


def flipped(rate, corrected, size=1 << 20, seed=1):
    data, found = np.zeros(size, np.uint8), BitErrors(rate, corrected, np.random.default_rng(seed))
    found.flip(data)
    assert np.unpackbits(data).sum() == found.bits
    return found


def test_as_many_bits_are_flipped_as_the_rate_states():
    found = flipped(1e-3, False)
    assert found.bits == pytest.approx(8 * (1 << 20) * 1e-3, rel=0.05) and found.uncorrectable == 0
    assert flipped(0.0, False).bits == 0


def test_a_code_corrects_codewords_of_16_errors_at_most():
    assert flipped(1e-3, True).bits == 0
    found = flipped(4e-3, True)  # 18 errors of 4,464 bits, in the mean
    assert 0.4 * 2048 < found.uncorrectable < 0.8 * 2048
    assert found.bits > 12 * found.uncorrectable
    assert flipped(2e-2, True).uncorrectable == 2048


def test_rows_of_a_small_model(monkeypatch):
    monkeypatch.setattr(errors, "_TOKENS", 32)
    monkeypatch.setattr(errors, "_HELD_OUT_WINDOWS", 1)
    settings = SizesSettings((), (), (), 1, Path())
    rows = list(errors.measure(str(DOCLM), settings, rates=(1e-8, 1e-3), seeds=(5, 6)))
    assert len(rows) == 2 * 2 * 6 and {row["seeds"] for row in rows} == {2}
    for row in rows:
        corrected, rate, left = (row[key] for key in ("corrected", "bit_error_rate", "bits_left_fraction"))
        if corrected:
            assert left == 0 and row["loss_increase"] == 0 and row["loss_increase_range"] == [0, 0]
        elif rate == 1e-8:
            assert left < 1e-6
        elif row["stored"] == "weights, coded":
            assert row["loss_increase"] is None and min(row["tensors_rejected"]) > 40
            assert row["seeds_without_loss"] == 2 and row["loss_increase_range"] is None
        else:
            assert left == pytest.approx(rate, rel=0.2)
            assert row["loss_increase"] is None or row["loss_increase"] > 0.01, row


def test_values_that_4_bits_cannot_hold_are_no_loss():
    """Regression: an error made a layer's keys infinite, which are not encoded; the bench ended there."""
    model = load_model(DOCLM)
    model.requires_grad_(False)
    name = "model.layers.1.self_attn.k_proj.weight"
    weights = {name: torch.full_like(model.get_parameter(name), torch.inf)}
    pages = errors._Pages(model, weights, torch.arange(8)[None], "int4")
    assert pages.loss(BitErrors(0.0, False, np.random.default_rng(0))) == (None, 0)


def test_a_seed_without_a_loss_is_above_all_others():
    tries = [BitErrors(1e-3, False, np.random.default_rng(seed), bits=1, read_bits=100) for seed in range(3)]
    row = errors._sum_up(tries, [(None, 0), (2.5, 0), (3.0, 1)], 2.0)
    assert (row["loss_increase"], row["loss_increase_range"], row["seeds_without_loss"]) == (1.0, [0.5, 1.0], 1)
    assert row["bits_left_fraction"] == 0.01 and row["tensors_rejected"] == [0, 0, 1]
    assert errors._sum_up(tries, [(None, 1), (None, 2), (3.0, 0)], 2.0)["loss_increase"] is None
