"""Rows of the bench of queues: every request, in turns, and nothing left behind."""

from nearflash.bench.storage import queues
from nearflash.storage.io.queue import usable_queues


def test_each_queue_has_a_row_of_each_request(tmp_path):
    rows = list(queues.run(tmp_path, sizes=(4096, 8192), depths=(2,), repeats=2, file_bytes=1 << 20))
    usable = [name for name, missing in usable_queues().items() if not missing]
    variants = [(name, False) for name in usable] + [("io_uring", True)] * ("io_uring" in usable)
    expected = {(call, kib, *variant) for call in ("read", "write") for kib in (4, 8) for variant in variants}
    assert {(row["call"], row["kib"], row["queue"], row["registered"]) for row in rows} == expected
    assert len(rows) == len(expected) and not list(tmp_path.iterdir())
    for row in rows:
        assert 0 < row["least_gb_per_second"] <= row["gb_per_second"] <= row["most_gb_per_second"]
        assert 0 <= row["least_cpu_ms_per_gb"] <= row["cpu_ms_per_gb"] <= row["most_cpu_ms_per_gb"]
