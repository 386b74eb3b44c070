"""Rows of the bench of NAND faults: as many faults as asked for, nothing lost, and controls that lose something."""

from collections import Counter

import pytest

from nearflash.abi.errors import CommandError
from nearflash.bench.storage import nand
from nearflash.bench.storage.nand_life import FaultKind, NandLife


def test_each_kind_has_its_faults_and_nothing_is_lost():
    rows = list(nand.run(faults=18, actions=30, seed=3, parts=[*FaultKind, "together"]))
    assert [row["part"] for row in rows] == [*FaultKind, "together"]
    assert sum(row["injected"] for row in rows) == 18
    assert not any(row["mismatches"] for row in rows)
    for row in rows:
        assert row["write_amplification"] >= row["write_amplification_without"] > 1
    assert rows[0]["blocks_retired"] and rows[0]["moved_bytes"]


@pytest.mark.full
def test_without_spares_lives_end_read_only():
    row = next(nand.run(actions=40, parts=["no-spare"]))
    assert row["read_only_ends"] and not row["lost_words"] and not row["mismatches"]


@pytest.mark.full
def test_controls_lose_something():
    rows = list(nand.run(actions=60, parts=["controls"]))
    assert len(rows) == 3 and all(row["lost_words"] for row in rows) and not any(row["mismatches"] for row in rows)


def test_a_life_is_repeatable():
    tallies = []
    for _ in range(2):
        life = NandLife(5, Counter(dict.fromkeys(FaultKind, 100)), spare_blocks=24)
        for _ in range(15):
            life.act()
        tallies.append((life.injector.tally, life.programmed_bytes))
    assert tallies[0] == tallies[1] and tallies[0][0].injected


@pytest.mark.parametrize("options", [{"faults": 0}, {"actions": 0}, {"parts": ["none"]}], ids=str)
def test_what_cannot_be(options):
    with pytest.raises(CommandError):
        next(nand.run(**options))
