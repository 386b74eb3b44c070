"""The update bench on a small command: every rule and profile, no mismatch, and a roofline that names its bound."""

import pytest

from nearflash.abi.errors import CommandError
from nearflash.verify.bench.update import run

STATE_BYTES = {"fp32": 4, "bf16": 2, "mx8": 1 + 1 / 32}


def test_rows_are_equal_to_the_model_and_near_the_roofline() -> None:
    rows = list(run(params=5000, config="update-tiny"))
    assert [(row["gradients"], row["state_format"], row["optimizer"], row["profile"]) for row in rows] == [
        *(("fp32", "fp32", "AdamW", profile) for profile in ("ieee", "ieee", "torch_fused", "deepspeed")),
        ("fp32", "fp32", "Adam", "ieee"),
        *(("fp32", "fp32", optimizer, profile)
          for profile in ("ieee", "torch_fused") for optimizer in ("SGD", "SGD", "AdaGrad")),
        ("fp32", "fp32", "Lion", "ieee"),
        *(("fp32", form, "AdamW", "ieee") for form in ("bf16", "bf16", "mx8", "mx8")),
        *(("topk:0.01", form, "AdamW", "ieee") for form in ("fp32", "bf16", "mx8") for _ in range(2)),
    ]  # fmt: skip
    for row in rows:
        assert row["bound"] == "lanes"
        assert row["mismatches"] == 0
        assert row["params"] == (4992 if row["state_format"] == "mx8" else 5000)
        assert 0.9 < row["port_roofline_fraction"] <= 1.0
        roles = sum(name in ("m", "v") for name in row["arrays"].split(", "))
        state = 8 + 2 * roles * STATE_BYTES[row["state_format"]]
        wanted = state + (6 if row["gradients"] == "fp32" else 2.1)  # read and written; g and the bf16 copy
        assert wanted - 0.2 < row["ddr_bytes_per_param"] < wanted + 0.2


def test_other_state_formats_are_refused() -> None:
    with pytest.raises(CommandError, match="state_formats must be of fp32, bf16, mx8, not fp8"):
        list(run(params=16, config="update-tiny", state_formats=["fp8"]))


def test_other_gradients_are_refused() -> None:
    with pytest.raises(
        CommandError, match=r"gradients must be fp32 or topk:SHARE with a share in \[0, 1\], not 'topk:2'"
    ):
        list(run(params=16, config="update-tiny", gradients=["topk:2"]))
