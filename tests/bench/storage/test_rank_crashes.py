"""A small part of the crash points of ranks; and that the bench notices ranks that do not go on together."""

import pytest

from nearflash.abi.optimizers import MasterFormat
from nearflash.bench.storage import rank_crashes
from nearflash.bench.storage.rank_crashes import rank_crash_points


@pytest.mark.parametrize(
    ("ranks", "master", "tries"),
    [
        *(pytest.param(*case, marks=pytest.mark.full) for case in ((3, "fp32", 4), (2, "fp32", 2))),
        (2, "split", 2),
    ],
)
def test_every_image_recovers(tmp_path, ranks, master, tries):
    found = rank_crash_points(tmp_path, ranks=ranks, steps=1, tries=tries, seed=ranks, master=MasterFormat(master))
    assert found.bad == []
    assert found.points > 125 * tries and found.newer > tries - 1


@pytest.mark.full
def test_ranks_that_stay_apart_are_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_crashes._Run, "_align", staticmethod(lambda stores: None))
    found = rank_crash_points(tmp_path, ranks=2, steps=1, tries=4, seed=1)
    assert any("not exactly at one of" in wrong for wrong in found.bad)
