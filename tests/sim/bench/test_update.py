"""The update bench on a small command: every rule and profile, no mismatch, and a roofline that names its bound."""

import pytest

from nearflash.abi.errors import CommandError
from nearflash.sim.bench.update import run


def test_rows_are_equal_to_the_model_and_near_the_roofline() -> None:
    rows = list(run(params=5000, config_name="update-tiny"))
    assert [(row["gradients"], row["optimizer"], row["profile"]) for row in rows] == [
        *(("fp32", "AdamW", profile) for profile in ("ieee", "ieee", "torch_fused", "deepspeed")),
        ("fp32", "Adam", "ieee"),
        *(("fp32", optimizer, profile)
          for profile in ("ieee", "torch_fused") for optimizer in ("SGD", "SGD", "AdaGrad")),
        ("fp32", "Lion", "ieee"),
        *(("topk:0.01", "AdamW", "ieee"),) * 2,
    ]  # fmt: skip
    for row in rows:
        assert row["bound"] == "lanes"
        assert row["mismatches"] == 0
        assert 0.9 < row["port_roofline_fraction"] <= 1.0
        arrays = len(row["arrays"].split(", "))
        wanted = 8 * arrays + (6 if row["gradients"] == "fp32" else 2.1)  # read and written; g and the bf16 copy
        assert wanted - 0.2 < row["ddr_bytes_per_param"] < wanted + 0.2


def test_other_gradients_are_refused() -> None:
    with pytest.raises(
        CommandError, match=r"gradients must be fp32 or topk:SHARE with a share in \[0, 1\], not 'topk:2'"
    ):
        list(run(params=16, config_name="update-tiny", gradients=["topk:2"]))
