"""The picture is drawn from rows, in the order of their bytes."""

import json

import pytest

from nearflash.bench.inference.plot import main, points

ROWS = [
    {"model": "m", "mode": "sparf", "flash_fraction": 0.4, "delta_nll_percent": 1.0, "delta_nll_percent_error": 0.2},
    {"model": "m", "mode": "sparf", "flash_fraction": 0.2, "delta_nll_percent": 9.0, "delta_nll_percent_error": None},
    {"model": "m", "mode": "dense", "flash_fraction": 1.0, "delta_nll_percent": 0.0, "delta_nll_percent_error": 0.0},
    {"model": "m", "skipped": "no models"},
]


def test_points_rise_in_bytes():
    assert points(ROWS) == {"m": {"sparf": [(0.2, 9.0, 0.0), (0.4, 1.0, 0.2)]}}


def test_an_image_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    rows, image = tmp_path / "rows.jsonl", tmp_path / "image.png"
    rows.write_text("\n".join(map(json.dumps, ROWS)))
    main([str(rows), str(image)])
    assert image.read_bytes().startswith(b"\x89PNG")
