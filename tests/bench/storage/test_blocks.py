"""The bench of block stores, in small: each part has its row, and nothing is left on the disk."""

from nearflash.bench.storage.blocks import PARTS, run


def test_each_part_has_its_row(tmp_path):
    rows = {
        row["part"]: row
        for row in run(tmp_path, [256 << 10], 8 << 20, repeats=1, gets=5, file_bytes=32 << 20, rebuild_bytes=4 << 20)
    }
    assert tuple(rows) == PARTS and not list(tmp_path.iterdir())
    rates, latency, rebuild, wear = rows.values()
    for call, disk in (("put", "write"), ("get", "read")):
        fraction = rates[f"{call}_gb_per_second"] / rates[f"disk_{disk}_gb_per_second"]
        assert abs(rates[f"{call}_roofline_fraction"] / fraction - 1) < 1e-9  # of one turn
    assert 0 < latency["get_p50_ms"] <= latency["get_p99_ms"] and latency["gets"] == 5
    assert rebuild["measured_blocks"] > 500
    assert rebuild["rebuild_seconds"] == rebuild["measured_seconds"] / rebuild["measured_blocks"] * 1e6
    assert wear["evicted"] and wear["moved"] and 1 < wear["write_amplification"] < 1.5
