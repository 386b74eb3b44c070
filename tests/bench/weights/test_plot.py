"""Curves of losses with bit errors."""

import json

import pytest

from nearflash.bench.weights.plot import curves, main

ROW = {"part": "errors", "model": "small", "subject": "kv", "form": "int4", "corrected": False, "seed": 0}
ROWS = [
    {**ROW, "bit_error_rate": 1e-3, "loss_increase": None},
    {**ROW, "bit_error_rate": 1e-6, "loss_increase": 0.1},
    {**ROW, "bit_error_rate": 1e-6, "loss_increase": 0.3, "seed": 1},
    {**ROW, "bit_error_rate": 1e-6, "loss_increase": 0.0, "corrected": True},
    {"part": "sizes", "model": "small"},
]


def test_seeds_are_averaged_and_lost_models_are_drawn():
    found = curves(ROWS)["small"]
    assert found["kv int4"] == [(1e-6, pytest.approx(0.2)), (1e-3, 20.0)]
    assert found["kv int4, corrected"] == [(1e-6, 0.0)]


def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    main([str(tmp_path / "rows.jsonl"), str(tmp_path / "errors.png")])
    assert (tmp_path / "errors.png").read_bytes().startswith(b"\x89PNG")
