from dataclasses import replace

import numpy as np
import pytest

from nearflash.model.fp.add import add
from nearflash.verify.bench import fp


@pytest.mark.parametrize(
    "names", [["add", "to_bf16"], pytest.param(["muladd", "div_by_invariant"], marks=pytest.mark.full)]
)
def test_one_object_for_each_operation(names):
    rows = list(fp.run(dict.fromkeys(names, 2_000), seed=1))
    assert [row["op"] for row in rows] == names
    assert all((row["vectors"], row["mismatches"]) == (2_000, 0) for row in rows)
    assert all(row["latency_cycles"] > 0 for row in rows)


def test_wrong_results_and_wrong_exceptions_are_counted(monkeypatch):
    def wrong(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        bits, flags = add(a, b)
        bits[:3] ^= np.uint32(1)
        flags[2:7] ^= np.uint8(1)
        return bits, flags

    monkeypatch.setitem(fp.OPERATIONS, "add", replace(fp.OPERATIONS["add"], model=wrong))
    (row,) = fp.run({"add": 1_000})
    assert row["mismatches"] == 7


def test_the_campaign_is_large_enough():
    assert all(fp.VECTORS[op] >= 7_500_000 for op in ("add", "mul", "div"))
    assert fp.VECTORS["fma"] >= 6_000_000
    assert fp.VECTORS["from_fp16"] == fp.VECTORS["from_bf16"] == 1 << 16
