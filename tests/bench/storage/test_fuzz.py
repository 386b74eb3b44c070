"""The bench `fuzz`, small; and that it notices what it is there for."""

import dataclasses
import json
import secrets

import pytest

from nearflash.abi.errors import CommandError
from nearflash.bench.storage import fuzz
from nearflash.device import replay
from nearflash.offload import results
from nearflash.offload.cache import kv_storage
from nearflash.storage.state import state_file, superblock
from nearflash.weights import file

FORMATS = fuzz.FORMATS.keys() - {"session"}  # which computes: its own tests have it


@pytest.fixture(scope="module")
def rows():
    return list(fuzz.run(30, FORMATS))


def test_every_mutation_is_told_or_harmless(rows):
    total = rows.pop()
    assert {row["format"] for row in rows} == FORMATS
    assert all(row["mutations"] == 10 for row in rows) and total["mutations"] == 10 * len(rows)
    assert total["raw_errors"] == total["silent"] == total["hangs"] == 0
    assert all(row["rejected"] + row["well_formed"] for row in rows)


def test_an_error_without_a_name_is_counted(monkeypatch):
    names = [field.name for field in dataclasses.fields(superblock.Superblock) if field.name != "stamp"]

    def parse(cls, path, body):
        return cls(superblock.Stamp(**body["stamp"]), *(body[name] for name in names))

    monkeypatch.setattr(superblock.Superblock, "parse", classmethod(parse))
    assert sum(row["raw_errors"] for row in fuzz.run(300, ["state"])) > 0


def test_another_content_is_counted(monkeypatch):
    monkeypatch.setattr(state_file, "crc32c", lambda data: 0)
    assert sum(row["silent"] for row in fuzz.run(100, ["state"])) > 0


def test_one_format_alone():
    rows = list(fuzz.run(20, ["weights"]))
    assert [(row["format"], row["class"]) for row in rows] == [
        ("weights", "damaged"), ("weights", "forged"), ("weights", "misdirected"), ("all", "all")
    ]  # fmt: skip
    with pytest.raises(CommandError, match=r"formats must be of state, .*, spill, not zip"):
        next(fuzz.run(20, ["zip"]))


@pytest.mark.parametrize(
    ("name", "owner", "attribute", "value"),
    [
        ("weights", file, "check_groups", lambda *_: None),
        ("topk", fuzz.tensors, "check_tiles", lambda *_: None),
        ("spill", kv_storage.DiskStorage, "_check", lambda *_: None),
        ("flash", secrets, "randbits", lambda bits: 0),
        ("results", results.Results, "_checksum", lambda own, body: 0),
        ("transcript", replay, "seal_line", lambda line, before="": json.dumps(line | {"crc32": ""})),
    ],
)
def test_a_piece_of_another_file_in_its_place_is_counted(monkeypatch, name, owner, attribute, value):
    """Without the check that binds it to its place."""
    monkeypatch.setattr(owner, attribute, value)
    counts = {row["class"]: row["silent"] for row in fuzz.run(90 if name in ("spill", "weights") else 450, [name])}
    assert counts["misdirected"] > 0
