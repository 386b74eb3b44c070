"""The rate of the disk that benches state."""

from nearflash.bench import disk


def test_the_disks_rate_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr("nearflash.bench.disk._PROBE_BYTES", 1 << 20)
    assert disk.disk_rate(tmp_path) > 0 and not list(tmp_path.iterdir())
