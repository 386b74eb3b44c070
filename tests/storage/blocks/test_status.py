"""`nearflash kv status` of block stores: counts of the file's whole life, over restarts and crashes."""

import json

import numpy as np

from nearflash.cli.main import main
from nearflash.storage.blocks import BlockStore
from nearflash.storage.blocks.record import LIFE

BLOCK = 4096


def status(path, capsys):
    assert main(["kv", "status", "--buffered", "--json", str(path)]) == 0
    return json.loads(capsys.readouterr().out)


def put(store, numbers):
    for number in numbers:
        assert store.put([b"%d" % number], [np.full(100, number % 256, np.uint8)]) == [True]


def test_counts_are_those_of_all_processes(tmp_path, capsys):
    path, counted = tmp_path / "blocks", dict.fromkeys(LIFE, 0)
    for first in (0, 150, 160):
        with BlockStore(path, 400_000, BLOCK, "a model", direct=False) as store:
            put(store, range(first, first + 150))
            stats = store.stats()
            beside = status(path, capsys)
        counted = {name: counted[name] + getattr(stats, name) for name in LIFE}
        after = status(path, capsys)
        assert beside == after and after["namespace"] == "a model" and after["blocks"] == stats.blocks
        # What is written beside blocks after the last erase is in no header.
        written = counted.pop("written_bytes")
        assert {name: after[name] for name in counted} == counted
        assert 0.9 * written < after["written_bytes"] <= written
        counted["written_bytes"] = written
    assert after["evicted"] and after["used_bytes"] == 100 * after["blocks"] and after["most_erases"] > 1
    assert after["capacity_bytes"] == path.stat().st_size and after["pinned"] is None


def test_the_table_has_a_line_for_each_count(tmp_path, capsys):
    with BlockStore(tmp_path / "blocks", 400_000, BLOCK, "a model", direct=False) as store:
        put(store, range(10))
    assert main(["kv", "status", "--buffered", str(tmp_path / "blocks")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[2:16].strip() for line in lines[1:]] == [
        *("namespace", "capacity", "used", "stored", "evicted", "wear", "pinned", "last durable")
    ]
    assert "a model" in lines[1] and "1,000 bytes, 10 blocks" in lines[3]
