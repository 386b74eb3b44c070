"""The update bench on a small command: every profile, no mismatch, and a roofline that names its bound."""

import pytest

from nearflash.abi.errors import CommandError
from nearflash.sim.bench.update import run


def test_rows_are_equal_to_the_model_and_near_the_roofline() -> None:
    rows = list(run(params=5000, config_name="update-tiny"))
    assert [(row["gradients"], row["profile"]) for row in rows] == [
        ("fp32", "ieee"),
        ("fp32", "ieee"),
        ("fp32", "torch_fused"),
        ("fp32", "deepspeed"),
        ("topk:0.01", "ieee"),
        ("topk:0.01", "ieee"),
    ]
    for row in rows:
        dense = row["gradients"] == "fp32"
        assert row["bound"] == "lanes"
        assert row["mismatches"] == 0
        assert 0.9 < row["port_roofline_fraction"] <= 1.0
        assert (29.9 if dense else 26.0) < row["ddr_bytes_per_param"] < (30.2 if dense else 26.3)


def test_parts_name_gradients() -> None:
    with pytest.raises(CommandError, match=r"parts must be fp32 or topk:SHARE with a share in \[0, 1\], not 'topk:2'"):
        list(run(params=16, config_name="update-tiny", parts=["topk:2"]))
