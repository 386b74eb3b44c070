"""The phases of a decode step add up to it."""

import json

import pytest

from nearflash.bench.inference.latency import breakdown, main

ROWS = [
    {"part": "8k", "case": "full-kv", "context": 8192, "batch": 4, "tokens_per_second": 8.0,
     "seconds_of_a_step": {"append": 0.1, "attend": 0.25, "read": 0.3}},
    {"part": "8k", "case": "memory", "context": 8192, "batch": 4, "tokens_per_second": 4.0, "seconds_of_a_step": {}},
    {"part": "8k", "speedup_sparf_page_over_full_kv": 2.0},
]  # fmt: skip


def test_phases_add_up_to_the_step():
    assert breakdown(ROWS[0]) == pytest.approx({"model and waits": 150, "append": 100, "attend": 250, "read": 300})
    assert breakdown(ROWS[1]) == {"model and waits": 1000, "read": 0}


def test_an_image_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    rows, image = tmp_path / "rows.jsonl", tmp_path / "image.png"
    rows.write_text("\n".join(map(json.dumps, ROWS)))
    main([str(rows), str(image)])
    assert image.read_bytes().startswith(b"\x89PNG")
