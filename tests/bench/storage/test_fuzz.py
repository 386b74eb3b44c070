"""The bench `fuzz`, small; and that it notices what it is there for."""

import pytest

from nearflash.abi.errors import CommandError
from nearflash.bench.storage import fuzz
from nearflash.storage.state import state_file, superblock


def test_every_mutation_is_told_or_harmless():
    *formats, total = fuzz.run(300)
    assert [row["format"] for row in formats] == [
        "state",
        "export",
        "flash",
        "transcript",
        "journal",
        "policy",
        "weights",
    ]
    assert total["mutations"] == 2100 and total["raw_errors"] == total["silent"] == total["hangs"] == 0
    assert all(row["rejected"] > 50 for row in formats)


def test_an_error_without_a_name_is_counted(monkeypatch):
    monkeypatch.setattr(superblock, "fields", lambda what, body, **kinds: tuple(body[name] for name in kinds))
    assert next(fuzz.run(300))["raw_errors"] > 0


def test_another_content_is_counted(monkeypatch):
    monkeypatch.setattr(state_file, "crc32c", lambda data: 0)
    assert next(fuzz.run(300))["silent"] > 0


def test_one_format_alone():
    rows = list(fuzz.run(20, ["weights"]))
    assert [row["format"] for row in rows] == ["weights", "all"]
    with pytest.raises(CommandError, match=r"formats must be of state, .*, weights, not zip"):
        next(fuzz.run(20, ["zip"]))
