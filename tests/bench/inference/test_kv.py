"""The bench of wear, with a model of two layers."""

import pytest

from nearflash.abi.errors import CommandError
from nearflash.bench.inference import kv
from nearflash.storage.kv import KvShape


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(kv, "SHAPE", KvShape(layers=2, kv_heads=2, dim=64))
    monkeypatch.setattr(kv, "_PAGES_PER_BLOCK", 16)
    mixed = (500, 300, 700, 400, 600)
    monkeypatch.setattr(kv, "CASES", {"long": ((1100,), 1000, 1, 2_000), "crowded": (mixed, 100, 2, 1_300)})


def test_a_long_sequence_and_one_crowd(small):
    long, crowded = kv.run()
    assert long["tokens"] == 1100 and long["erases"] == 0
    assert long["programmed_pages"]["token"] == 4 * 17 and long["programmed_pages"]["index"] == 4 * 2
    assert long["write_amplification"] == 76 * 16384 / long["host_bytes"]
    assert crowded["tokens"] == 2500 and crowded["erases"] > 0
    assert crowded["erases_of_a_block_least"] <= crowded["erases_of_a_block_most"]


def test_parts(small):
    assert [row["case"] for row in kv.run(["long"])] == ["long"]
    with pytest.raises(CommandError, match="parts must be of long, crowded, not short"):
        next(kv.run(["short"]))
