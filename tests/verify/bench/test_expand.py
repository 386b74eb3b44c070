"""The expand bench on short runs: no mismatch, and no beat that waits where the input keeps up."""

import pytest

from nearflash.abi.bitmap import ElementFormat
from nearflash.abi.errors import CommandError
from nearflash.verify.bench import expand


def test_a_bitmap_beat_a_cycle_at_every_density(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expand, "BITMAPS", ((8, ElementFormat.INT8),))
    rows = list(expand.run(parts=["bitmap"], beats=256))
    assert [row["density"] for row in rows] == [k / 16 for k in range(17)]
    for row in rows:
        assert (row["format"], row["width"], row["mismatches"]) == ("bitmap-int8", 8, 0)
        assert row["beats_per_cycle"] == pytest.approx(1.0, abs=0.01)
        assert row["output_gbps_300mhz"] == pytest.approx(2.4, abs=0.03)


@pytest.mark.full
def test_topk_groups_wait_only_for_the_input() -> None:
    for row in expand.run(parts=["topk"], beats=1 << 14):
        assert row["mismatches"] == 0
        if row["density"] < (0.5 if row["format"] == "topk-fp16" else 1 / 3):
            assert row["beats_per_cycle"] > 0.999


def test_a_kernel_expands_a_group_a_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expand, "KERNELS", {"expand-tiny": 1024})
    rows = list(expand.run(parts=["kernel"], beats=4096))
    assert len(rows) == 9 * 5
    for row in rows:
        assert (row["config"], row["width"], row["mismatches"]) == ("expand-tiny", 4, 0)
        assert row["cycles_per_element"] < 1.15 * max(1 / 4, row["input_bytes_per_element"] / 8)  # of the port


def test_parts_are_named() -> None:
    with pytest.raises(CommandError, match="parts must be of bitmap, topk, kernel, not coded"):
        list(expand.run(parts=["coded"]))
