"""The update bench on a small command: every profile, no mismatch, and a roofline that names its bound."""

from nearflash.sim.bench.update import run


def test_rows_are_equal_to_the_model_and_near_the_roofline() -> None:
    rows = list(run(params=5000, config_name="update-tiny"))
    assert [row["profile"] for row in rows] == ["ieee", "torch_fused", "deepspeed", "ieee"]
    assert [row["bound"] for row in rows] == ["lanes"] * 4
    for row in rows:
        assert row["mismatches"] == 0
        assert 0.9 < row["port_roofline_fraction"] <= 1.0
        assert 29.9 < row["ddr_bytes_per_param"] < 30.2
